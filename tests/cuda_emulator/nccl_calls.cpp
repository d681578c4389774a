// The functions of NCCL that CuPy calls: what they check, and how ranks find each other.
#include "nccl.h"
#include <poll.h>
#include <random>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

using namespace emu;
using namespace nccl;

struct UniqueId { char internal[128]; };
struct Hello { int rank, ranks, device; };

static const char PREFIX[] = "emulated-nccl-";
static const int VERSION = 22707;

static int refuse(const std::string& why, Result result = ARGUMENT) {
    fprintf(stderr, "emulator: NCCL: %s\n", why.c_str());
    return result;
}

// ---- how ranks find each other -------------------------------------------------------
static socklen_t address_of(sockaddr_un& address, const UniqueId& id, int rank) {
    std::string name = std::string(id.internal, strnlen(id.internal, 64)) + "-" + std::to_string(rank);
    address = {};
    address.sun_family = AF_UNIX;
    memcpy(address.sun_path + 1, name.data(), name.size());  // no file: it goes with the process
    return offsetof(sockaddr_un, sun_path) + 1 + name.size();
}

using Time = std::chrono::steady_clock::time_point;
static bool comes(int socket, Time until) {
    auto left = std::chrono::duration_cast<std::chrono::milliseconds>(until - std::chrono::steady_clock::now());
    pollfd watched{socket, POLLIN, 0};
    return poll(&watched, 1, std::max<long>(left.count(), 0)) == 1;
}
static int new_socket() { return socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0); }
static bool hears(int socket, Hello& hello, Time until) {
    return comes(socket, until) && recv(socket, &hello, sizeof hello, 0) == sizeof hello;
}

static int connect_to(const UniqueId& id, int rank, Time until) {
    sockaddr_un address;
    socklen_t length = address_of(address, id, rank);
    for (;;) {
        int made = new_socket();
        if (!connect(made, (sockaddr*)&address, length)) return made;
        close(made);
        if (std::chrono::steady_clock::now() >= until) return -1;
        usleep(2000);
    }
}

static int meet(Comm* comm, const UniqueId& id, int listener) {
    Time until = deadline();
    Hello own{comm->rank, comm->ranks, comm->device}, other;
    std::vector<int> devices(comm->ranks, -1);
    auto know = [&] {
        if (other.ranks != own.ranks)
            return refuse("rank " + std::to_string(own.rank) + " says that there are " + std::to_string(own.ranks) +
                          " ranks, rank " + std::to_string(other.rank) + " says " + std::to_string(other.ranks), USAGE);
        devices[other.rank] = other.device;
        return int(OK);
    };
    auto missing = [](int rank) { return refuse("rank " + std::to_string(rank) + " does not come", SYSTEM); };
    for (int rank = 0; rank < own.rank; rank++) {
        int made = comm->sockets[rank] = connect_to(id, rank, until);
        if (made < 0) return missing(rank);
        send(made, &own, sizeof own, MSG_NOSIGNAL);
    }
    for (int i = own.rank + 1; i < own.ranks; i++) {
        int made = comes(listener, until) ? accept4(listener, nullptr, nullptr, SOCK_CLOEXEC) : -1;
        if (made < 0 || !hears(made, other, until)) return missing(i);
        send(made, &own, sizeof own, MSG_NOSIGNAL);
        if (int error = know()) return error;
        comm->sockets[other.rank] = made;
    }
    for (int rank = 0; rank < own.rank; rank++) {
        if (!hears(comm->sockets[rank], other, until)) return missing(rank);
        if (int error = know()) return error;
    }
    devices[own.rank] = own.device;
    for (int rank = 0; rank < own.ranks; rank++)
        for (int before = 0; before < rank; before++)
            if (devices[rank] == devices[before])
                return refuse("ranks " + std::to_string(before) + " and " + std::to_string(rank) + " have device " +
                              std::to_string(devices[rank]) + "; each needs its own", USAGE);
    return OK;
}

static int open(Comm** out, int ranks, const UniqueId& id, int rank) {
    *out = nullptr;
    if (ranks < 1 || rank < 0 || rank >= ranks) return refuse("there is no rank " + std::to_string(rank));
    if (strncmp(id.internal, PREFIX, strlen(PREFIX))) return refuse("the id does not come from ncclGetUniqueId");
    sockaddr_un address;
    socklen_t length = address_of(address, id, rank);
    int listener = new_socket();
    int error = bind(listener, (sockaddr*)&address, length) || listen(listener, ranks)
        ? refuse("rank " + std::to_string(rank) + " is there already", USAGE) : int(OK);
    Comm* comm = new Comm;
    comm->rank = rank;
    comm->ranks = ranks;
    comm->device = current_device();
    comm->sockets.assign(ranks, -1);
    comm->ended.assign(ranks, false);
    comm->left.assign(ranks, false);
    if (!error) error = meet(comm, id, listener);
    close(listener);
    if (error) {
        for (int socket : comm->sockets) if (socket >= 0) close(socket);
        delete comm;
        return error;
    }
    open_mail(comm);
    *out = comm;
    return OK;
}

static int close_comm(Comm* comm, bool abort) {
    {
        Mail lock(mail);
        if (!comms.count(comm)) return refuse("this communicator is not there, or was destroyed");
        if (abort) comm->aborted = true;
        came.notify_all();
    }
    Lock lock(mutex);
    while (comm->last && !comm->last->done) run_until(comm->last->stream, comm->last->done);
    close_mail(comm);
    delete comm;
    return OK;
}

// ---- calls ---------------------------------------------------------------------------
struct Grouped { Comm* comm; Operation operation; Stream* stream; int place; };
static thread_local int depth = 0;
static thread_local std::vector<Grouped> group;

static int check(Comm* comm, const void* pointer, size_t bytes, const char* name) {
    if (!bytes) return OK;
    const Block* block = block_of(pointer);
    if (!block) return refuse(std::string(name) + " is not memory of a device (of the host, or freed?)");
    if (block->device >= 0 && block->device != comm->device) return refuse(std::string(name) + " is on another device");
    const char* end = (const char*)pointer + bytes;
    while (block && end > block->address + block->bytes) block = block_of(block->address + block->bytes);
    if (!block)
        return refuse(std::string(name) + " has fewer bytes than " + std::to_string(bytes));
    return OK;
}

static void flush() {  // with the lock; one batch for each communicator
    while (!group.empty()) {
        Comm* comm = group[0].comm;
        Stream* stream = group[0].stream;
        int place = group[0].place;
        std::vector<Operation> operations;
        std::vector<Grouped> others;
        std::vector<Stream*> streams;
        for (Grouped& g : group) {
            if (g.comm != comm) { others.push_back(std::move(g)); continue; }
            if (g.stream != stream) streams.push_back(g.stream);
            operations.push_back(std::move(g.operation));
        }
        group = std::move(others);
        for (Stream* other : streams) order(other, stream);
        issue(comm, std::move(operations), stream, place);
        for (Stream* other : streams) order(stream, other);
    }
}

static int call(Kind kind, const void* from, void* to, size_t count, int type, int op, int root, Comm* comm, void* handle) {
    int place = here();
    Lock lock(mutex);
    {
        Mail mail_lock(mail);
        if (!comms.count(comm)) return refuse("this communicator is not there, or was destroyed");
        for (int rank = 0; rank < comm->ranks; rank++)
            if (comm->ended[rank]) return refuse("the process of rank " + std::to_string(rank) + " has ended", REMOTE);
    }
    if (type < 0 || type >= int(std::size(SIZES))) return refuse("type " + std::to_string(type) + " is not there");
    if (op < SUM || op > AVERAGE) return refuse("operator " + std::to_string(op) + " is not there");
    if (root < 0 || root >= comm->ranks) return refuse("there is no rank " + std::to_string(root));
    if (kind >= SEND && root == comm->rank) return refuse("a rank cannot talk to itself here");
    size_t bytes = count * SIZES[type], all = bytes * comm->ranks;
    bool at_root = root == comm->rank;
    Operation o{{kind, type, op, root, count}, from, to, bytes, bytes, true};
    switch (kind) {
        case REDUCE: if (!at_root) o.received = 0; break;
        case BROADCAST: if (!at_root) o.sent = 0; break;
        case REDUCE_SCATTER: o.sent = all; break;
        case ALL_GATHER: o.received = all; break;
        case SEND: o.received = 0; break;
        case RECEIVE: o.sent = 0; break;
        default: break;
    }
    o.posts_data = o.sent > 0;
    if (int error = check(comm, from, o.sent, "sendbuff")) return error;
    if (int error = check(comm, to, o.received, "recvbuff")) return error;
    Stream* stream = (uintptr_t)handle > 2 ? (Stream*)handle : default_of(comm->device);
    if (stream->dead || stream->device != comm->device) return refuse("the stream is gone, or of another device");
    group.push_back({comm, std::move(o), stream, place});
    if (!depth) flush();
    return OK;
}

static int ask(Comm* comm, int* out, int Comm::*what) {
    Mail lock(mail);
    if (!comms.count(comm)) return refuse("this communicator is not there, or was destroyed");
    *out = comm->*what;
    return OK;
}

extern "C" {
int ncclGetVersion(int* out) { *out = VERSION; return OK; }
const char* ncclGetErrorString(int result) {
    switch (result) {
        case OK: return "no error";
        case SYSTEM: return "a rank did not come (emulated NCCL; standard error says more)";
        case ARGUMENT: return "invalid argument (emulated NCCL; standard error says more)";
        case USAGE: return "invalid usage (emulated NCCL; standard error says more)";
        case REMOTE: return "the process of another rank has ended (emulated NCCL)";
        default: return "unknown result";
    }
}
int ncclGetUniqueId(UniqueId* out) {
    *out = {};
    std::random_device random;
    snprintf(out->internal, sizeof out->internal, "%s%d-%08x%08x", PREFIX, getpid(), random(), random());
    return OK;
}
int ncclCommInitRank(Comm** out, int ranks, UniqueId id, int rank) { return open(out, ranks, id, rank); }
int ncclCommInitRankConfig(Comm** out, int ranks, UniqueId id, int rank, void*) { return open(out, ranks, id, rank); }
int ncclCommInitAll(Comm**, int, const int*) { return refuse("ranks are processes here, not devices of one", USAGE); }
int ncclCommSplit(Comm*, int, int, Comm**, void*) { return refuse("ncclCommSplit is not there", USAGE); }
int ncclCommDestroy(Comm* comm) { return close_comm(comm, false); }
int ncclCommAbort(Comm* comm) { return close_comm(comm, true); }
int ncclCommCount(Comm* comm, int* out) { return ask(comm, out, &Comm::ranks); }
int ncclCommCuDevice(Comm* comm, int* out) { return ask(comm, out, &Comm::device); }
int ncclCommUserRank(Comm* comm, int* out) { return ask(comm, out, &Comm::rank); }
int ncclCommGetAsyncError(Comm* comm, int* out) {
    Mail lock(mail);
    if (!comms.count(comm)) return refuse("this communicator is not there, or was destroyed");
    *out = OK;
    for (bool ended : comm->ended) if (ended) *out = REMOTE;
    return OK;
}
int ncclGroupStart() { depth++; return OK; }
int ncclGroupEnd() {
    if (!depth) return refuse("ncclGroupEnd without ncclGroupStart", USAGE);
    Lock lock(mutex);
    if (!--depth) flush();
    return OK;
}
int ncclAllReduce(const void* from, void* to, size_t count, int type, int op, Comm* comm, void* stream) {
    return call(ALL_REDUCE, from, to, count, type, op, 0, comm, stream);
}
int ncclReduce(const void* from, void* to, size_t count, int type, int op, int root, Comm* comm, void* stream) {
    return call(REDUCE, from, to, count, type, op, root, comm, stream);
}
int ncclBroadcast(const void* from, void* to, size_t count, int type, int root, Comm* comm, void* stream) {
    return call(BROADCAST, from, to, count, type, SUM, root, comm, stream);
}
int ncclBcast(void* at, size_t count, int type, int root, Comm* comm, void* stream) {
    return call(BROADCAST, at, at, count, type, SUM, root, comm, stream);
}
int ncclReduceScatter(const void* from, void* to, size_t count, int type, int op, Comm* comm, void* stream) {
    return call(REDUCE_SCATTER, from, to, count, type, op, 0, comm, stream);
}
int ncclAllGather(const void* from, void* to, size_t count, int type, Comm* comm, void* stream) {
    return call(ALL_GATHER, from, to, count, type, SUM, 0, comm, stream);
}
int ncclSend(const void* from, size_t count, int type, int peer, Comm* comm, void* stream) {
    return call(SEND, from, nullptr, count, type, SUM, peer, comm, stream);
}
int ncclRecv(void* to, size_t count, int type, int peer, Comm* comm, void* stream) {
    return call(RECEIVE, nullptr, to, count, type, SUM, peer, comm, stream);
}
}
