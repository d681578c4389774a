// NCCL: each rank is a process of this machine; they talk through sockets.
//
// A call is queued on its stream. When the stream reaches it, the rank posts its data to
// the others and waits for theirs; each computes in the order of ranks, so all have the
// same bits. A rank for which others wait goes on by itself, as a GPU does: a thread runs
// the stream up to the call. A process that ends closes its sockets.
#include "nccl.h"
#include <algorithm>
#include <fcntl.h>
#include <poll.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <unistd.h>

using namespace emu;
using Half = _Float16;

namespace nccl {

// All below is kept for ever: threads use it until the process is gone.
std::mutex& mail = *new std::mutex;  // guards what has come; taken after emu::mutex
std::condition_variable& came = *new std::condition_variable;
std::set<Comm*>& comms = *new std::set<Comm*>;
static bool ending = false;

std::chrono::steady_clock::time_point deadline() {
    const char* given = getenv("EMU_NCCL_SECONDS");
    return std::chrono::steady_clock::now() + std::chrono::milliseconds(given ? long(atof(given) * 1e3) : 300'000);
}
static std::string words(const Call& c) {
    return std::string(NAMES[c.kind]) + " of " + std::to_string(c.count) + " of type " + std::to_string(c.type) +
           ", operator " + std::to_string(c.op) + ", root " + std::to_string(c.root);
}

// ---- messages ------------------------------------------------------------------------
static void tell(Comm* comm, int rank, const Message& message, int file = -1) {
    if (comm->sockets[rank] < 0) return;
    iovec part{(void*)&message, sizeof message};
    alignas(cmsghdr) char room[CMSG_SPACE(sizeof(int))] = {};
    msghdr header{};
    header.msg_iov = &part;
    header.msg_iovlen = 1;
    if (file >= 0) {
        header.msg_control = room;
        header.msg_controllen = sizeof room;
        cmsghdr* extra = CMSG_FIRSTHDR(&header);
        extra->cmsg_level = SOL_SOCKET;
        extra->cmsg_type = SCM_RIGHTS;
        extra->cmsg_len = CMSG_LEN(sizeof(int));
        memcpy(CMSG_DATA(extra), &file, sizeof file);
    }
    sendmsg(comm->sockets[rank], &header, MSG_NOSIGNAL);  // the receiver finds out who has ended
}

static bool hear(Comm* comm, int rank) {  // whether the rank is still there
    Message message;
    iovec part{&message, sizeof message};
    alignas(cmsghdr) char room[CMSG_SPACE(sizeof(int))];
    msghdr header{};
    header.msg_iov = &part;
    header.msg_iovlen = 1;
    header.msg_control = room;
    header.msg_controllen = sizeof room;
    ssize_t bytes = recvmsg(comm->sockets[rank], &header, MSG_CMSG_CLOEXEC);
    Mail lock(mail);
    if (bytes != sizeof message) {
        if (!comm->left[rank]) comm->ended[rank] = true;
        came.notify_all();
        return false;
    }
    int file = -1;
    if (cmsghdr* extra = CMSG_FIRSTHDR(&header)) memcpy(&file, CMSG_DATA(extra), sizeof file);
    Key key{rank, message.line, message.number};
    if (message.word == BYE) comm->left[rank] = true;
    else comm->issued.insert(key);
    if (message.word == POSTED) comm->posts[key] = {message, file};
    came.notify_all();
    return true;
}

static void receive_all(Comm* comm) {
    std::vector<pollfd> watched{{comm->wakes[0], POLLIN, 0}};
    for (int socket : comm->sockets) watched.push_back({socket, POLLIN, 0});  // -1 is passed over
    while (poll(watched.data(), watched.size(), -1) >= 0 || errno == EINTR) {
        if (watched[0].revents) return;
        for (int rank = 0; rank < comm->ranks; rank++)
            if (watched[rank + 1].revents && !hear(comm, rank)) watched[rank + 1].fd = -1;
    }
}

// ---- what calls do -------------------------------------------------------------------
template <class T> struct Sum { using type = T; };
template <> struct Sum<Half> { using type = float; };

template <class T> static void reduce(T* into, const T* from, size_t count, int op) {
    using S = typename Sum<T>::type;
    for (size_t i = 0; i < count; i++) {
        S a = into[i], b = from[i];
        switch (op) {
            case PRODUCT: into[i] = a * b; break;
            case MAX: into[i] = std::max(a, b); break;
            case MIN: into[i] = std::min(a, b); break;
            default: into[i] = a + b;
        }
    }
}
template <class T> static void reduce_all(char* to, const std::vector<const char*>& parts, size_t count, int op) {
    memcpy(to, parts[0], count * sizeof(T));
    for (size_t r = 1; r < parts.size(); r++) reduce((T*)to, (const T*)parts[r], count, op);
    if (op == AVERAGE) for (size_t i = 0; i < count; i++) ((T*)to)[i] = ((T*)to)[i] / T(parts.size());
}
static void reduce_type(int type, char* to, const std::vector<const char*>& parts, size_t count, int op) {
    switch (type) {
        case 0: return reduce_all<int8_t>(to, parts, count, op);
        case 1: return reduce_all<uint8_t>(to, parts, count, op);
        case 2: return reduce_all<int32_t>(to, parts, count, op);
        case 3: return reduce_all<uint32_t>(to, parts, count, op);
        case 4: return reduce_all<int64_t>(to, parts, count, op);
        case 5: return reduce_all<uint64_t>(to, parts, count, op);
        case 6: return reduce_all<Half>(to, parts, count, op);
        case 7: return reduce_all<float>(to, parts, count, op);
        default: return reduce_all<double>(to, parts, count, op);
    }
}

struct File {  // memory that another process can have, too
    int number = -1;
    char* at = nullptr;
    size_t bytes;
    File(int of, size_t size) : number(of), bytes(size) {
        if (number < 0 || !bytes) return;
        void* address = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, number, 0);
        if (address == MAP_FAILED) die("no memory for what NCCL sends");
        at = (char*)address;
    }
    File(const File&) = delete;
    ~File() {
        if (at) munmap(at, bytes);
        if (number >= 0) close(number);
    }
};
static int new_file(size_t bytes) {
    int file = memfd_create("nccl", MFD_CLOEXEC);
    if (file < 0 || ftruncate(file, bytes)) die("no memory for what NCCL sends");
    return file;
}

static void post(Comm* comm, Operation& o) {
    Message message = o.message;
    message.word = POSTED;
    message.bytes = o.posts_data ? o.sent : 0;
    File file(o.posts_data ? new_file(o.sent) : -1, message.bytes);
    if (file.at) {
        read(o.from, o.sent);
        memcpy(file.at, o.from, o.sent);
    }
    for (const Key& key : o.awaited) tell(comm, key.rank, message, file.number);
}

// Whether all have posted; false if the communicator was aborted.
static bool await(Comm* comm, const Operation& o) {
    Mail lock(mail);
    auto end = deadline();
    for (const Key& key : o.awaited) {
        std::string what = words(o.call) + " waits for rank " + std::to_string(key.rank);
        while (!comm->posts.count(key)) {
            if (comm->aborted) return false;
            if (comm->ended[key.rank]) die("NCCL: " + what + ", whose process has ended");
            if (comm->left[key.rank]) die("NCCL: " + what + ", which has destroyed its communicator");
            if (came.wait_until(lock, end) == std::cv_status::timeout) die("NCCL: " + what + ", which does not come");
        }
        Call mine = o.call, theirs = comm->posts[key].message.call;
        if (mine.kind >= SEND) theirs.kind = mine.kind, theirs.root = mine.root;  // they name each other
        if (memcmp(&mine, &theirs, sizeof mine))
            die("NCCL: rank " + std::to_string(comm->rank) + " calls " + words(o.call) + "; rank " +
                std::to_string(key.rank) + " calls " + words(comm->posts[key].message.call));
    }
    return true;
}

static void apply(Comm* comm, const Operation& o) {
    std::vector<std::unique_ptr<File>> files(comm->ranks);
    std::vector<const char*> parts(comm->ranks);
    {
        Mail lock(mail);
        for (const Key& key : o.awaited) {
            Post& found = comm->posts[key];
            files[key.rank] = std::make_unique<File>(found.file, found.message.bytes);
            parts[key.rank] = files[key.rank]->at;
            comm->posts.erase(key);
            comm->issued.erase(key);
        }
    }
    std::string own;  // the sum may go where it lies
    if (o.posts_data) own.assign((const char*)o.from, o.sent);
    parts[comm->rank] = own.data();
    const Call& c = o.call;
    size_t unit = SIZES[c.type], share = o.received;
    if (!o.received) return;
    write(o.to, o.received);
    char* to = (char*)o.to;
    switch (c.kind) {
        case ALL_REDUCE: case REDUCE: return reduce_type(c.type, to, parts, c.count, c.op);
        case REDUCE_SCATTER:
            for (const char*& part : parts) part += share * comm->rank;
            return reduce_type(c.type, to, parts, c.count, c.op);
        case ALL_GATHER:
            for (const char* part : parts) to = (char*)memcpy(to, part, c.count * unit) + c.count * unit;
            return;
        case BROADCAST: memcpy(to, parts[c.root], share); return;
        default: memcpy(to, parts[o.awaited[0].rank], share);
    }
}

static void run_batch(Comm* comm, Batch& batch) {
    bool aborted;
    {
        Mail lock(mail);
        aborted = comm->aborted;
    }
    if (!aborted) {
        for (Operation& o : batch.operations) post(comm, o);
        for (Operation& o : batch.operations) aborted = aborted || !await(comm, o);
        if (!aborted) for (Operation& o : batch.operations) apply(comm, o);
    }
    Mail lock(mail);
    batch.done = true;
    auto& queued = comm->queued;
    queued.erase(std::find_if(queued.begin(), queued.end(), [&](auto& other) { return other.get() == &batch; }));
}

static bool is_ready(Comm* comm, const Batch& batch) {
    Mail lock(mail);
    for (const Operation& o : batch.operations)
        for (const Key& key : o.awaited)
            if (!comm->issued.count(key)) return false;
    return true;
}

// Runs what other ranks wait for; a GPU does not wait for its program either.
static std::shared_ptr<Batch> wanted() {
    for (Comm* comm : comms)
        for (auto& batch : comm->queued)
            for (const Operation& o : batch->operations)
                for (const Key& key : o.awaited)
                    if (comm->posts.count(key)) return batch;
    return nullptr;
}
static void serve() {
    for (;;) {
        std::shared_ptr<Batch> batch;
        {
            Mail lock(mail);
            while (!(batch = wanted())) came.wait(lock);
        }
        Lock lock(mutex);
        if (ending) return;
        run_until(batch->stream, batch->done);
    }
}

// ---- from outside --------------------------------------------------------------------
static void leave_to_parent() {  // in a forked child: an end of the parent must be seen
    for (Comm* comm : comms) for (int socket : comm->sockets) if (socket >= 0) close(socket);
    comms.clear();
}

void open_mail(Comm* comm) {
    static const bool served = [] {
        atexit([] { Lock lock(mutex); ending = true; });
        pthread_atfork(nullptr, nullptr, leave_to_parent);
        std::thread(serve).detach();
        return true;
    }();
    Mail lock(mail);
    if (served) comms.insert(comm);
    if (pipe2(comm->wakes, O_CLOEXEC)) die("no pipe for NCCL");
    comm->receiver = std::thread([comm] { receive_all(comm); });
}

void close_mail(Comm* comm) {
    {
        Mail lock(mail);
        comms.erase(comm);
    }
    for (int rank = 0; rank < comm->ranks; rank++) tell(comm, rank, {BYE});
    close(comm->wakes[1]);
    comm->receiver.join();
    close(comm->wakes[0]);
    for (auto& [key, found] : comm->posts) if (found.file >= 0) close(found.file);
    for (int socket : comm->sockets) if (socket >= 0) close(socket);
}

static const int OTHER_SIDE[] = {0, 2, 1};  // of a line of calls

void issue(Comm* comm, std::vector<Operation> operations, Stream* stream, int place) {
    counters[LAUNCH]++;
    if (idle) return;
    auto batch = std::make_shared<Batch>();
    for (Operation& o : operations) {
        int line = o.call.kind == SEND ? 1 : o.call.kind == RECEIVE ? 2 : 0;
        long number = comm->numbers[{line, line ? o.call.root : 0}]++;
        o.message = {ISSUED, line, number, o.call};
        for (int rank = 0; rank < comm->ranks; rank++)
            if (rank != comm->rank && (!line || rank == o.call.root)) o.awaited.push_back({rank, OTHER_SIDE[line], number});
        for (const Key& key : o.awaited) tell(comm, key.rank, o.message);
    }
    batch->operations = std::move(operations);
    batch->stream = stream;
    // One call after the other, whatever their streams; that is no promise to the program.
    std::shared_ptr<Batch> last = comm->last;
    if (last && !last->done && last->stream != stream)
        put(stream, [last] { run_until(last->stream, last->done); }, place, [=] { return is_ready(comm, *last); });
    comm->last = batch;
    {
        Mail lock(mail);
        comm->queued.push_back(batch);
    }
    put(stream, [=] { run_batch(comm, *batch); }, place, [=] { return is_ready(comm, *batch); });
    came.notify_all();  // others may wait for it already
}

}  // namespace nccl
