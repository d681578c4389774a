// The parts of the emulated NCCL share this: communicators and queued calls.
#pragma once
#include "core.h"
#include <chrono>
#include <condition_variable>
#include <map>
#include <set>
#include <thread>
#include <tuple>

namespace nccl {

enum Result { OK = 0, SYSTEM = 2, ARGUMENT = 4, USAGE = 5, REMOTE = 6 };
enum Kind { ALL_REDUCE, REDUCE, BROADCAST, REDUCE_SCATTER, ALL_GATHER, SEND, RECEIVE };
const char* const NAMES[] = {"AllReduce", "Reduce", "Broadcast", "ReduceScatter", "AllGather", "Send", "Recv"};
enum Operator { SUM, PRODUCT, MAX, MIN, AVERAGE };
const size_t SIZES[] = {1, 1, 4, 4, 8, 8, 2, 4, 8};  // of the types; 9 and more are not there

struct Call {  // what all ranks must agree about
    int kind, type, op, root;
    size_t count;
};
enum Word { ISSUED, POSTED, BYE };
struct Message {
    int word;
    int line;  // of calls: 0 those of all ranks, else 1 sends, 2 receives of a pair
    long number;
    Call call;
    size_t bytes;  // of the data, in the file that comes with it
};

struct Key {
    int rank, line;
    long number;
    bool operator<(const Key& o) const { return std::tie(rank, line, number) < std::tie(o.rank, o.line, o.number); }
};
struct Post { Message message; int file; };

struct Operation {
    Call call;
    const void* from;
    void* to;
    size_t sent, received;  // bytes
    bool posts_data;
    Message message;
    std::vector<Key> awaited;
};

struct Batch {  // what one group has on one communicator
    std::vector<Operation> operations;
    emu::Stream* stream;
    bool done = false;
};

struct Comm {
    int rank, ranks, device;
    std::vector<int> sockets;  // by rank
    int wakes[2];  // a pipe
    std::thread receiver;
    std::map<Key, Post> posts;
    std::set<Key> issued;
    std::vector<bool> ended, left;  // by rank: without a word, after destroying
    std::vector<std::shared_ptr<Batch>> queued;
    std::shared_ptr<Batch> last;
    std::map<std::pair<int, int>, long> numbers;  // of calls, by line and rank
    bool aborted = false;
};

extern std::mutex& mail;  // guards what has come; taken after emu::mutex
extern std::condition_variable& came;
extern std::set<Comm*>& comms;
using Mail = std::unique_lock<std::mutex>;

std::chrono::steady_clock::time_point deadline();  // EMU_NCCL_SECONDS from now
void open_mail(Comm* comm);  // receives and serves from now on
void close_mail(Comm* comm);
void issue(Comm* comm, std::vector<Operation> operations, emu::Stream* stream, int place);

}  // namespace nccl
