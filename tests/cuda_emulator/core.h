// What the parts of the emulator share: devices, streams whose work runs late, clocks.
#pragma once
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>
#include <cuda_runtime_api.h>

namespace emu {

// Whoever calls CUDA holds this, kernels included: nothing runs at the same time.
extern std::recursive_mutex mutex;
using Lock = std::lock_guard<std::recursive_mutex>;

// ---- who happens before whom ---------------------------------------------------------
// Slot 0 is the program, the others are streams. An entry is the last step of that slot
// that is known to be over.
constexpr int SLOTS = 24;
using Clocks = std::array<uint32_t, SLOTS>;
extern Clocks program;  // what the program has waited for
extern const bool watching;  // EMU_RACES: accesses are compared with the clocks

inline void join(Clocks& into, const Clocks& other) {
    for (int i = 0; i < SLOTS; i++) if (into[i] < other[i]) into[i] = other[i];
}

// ---- streams -------------------------------------------------------------------------
struct Stream;

struct Mark {  // one recording of an event, which may be recorded again or destroyed meanwhile
    bool done = false;
    double when = 0;  // seconds
    Stream* stream = nullptr;
    Clocks clocks{};
};

struct Task {
    std::function<void()> run;
    std::shared_ptr<Mark> after;  // what must be done before
    std::shared_ptr<Clocks> issued;  // what the program had waited for
    int place = 0;  // where the program has issued it
    long meeting = 0;  // with other processes
};

struct Stream {
    int device = 0;
    int slot = 1;
    bool blocking = true;  // keeps order with the device's legacy default stream
    bool dead = false;
    std::deque<Task> tasks;
    Clocks clocks{};
};

Stream* stream_of(const void* handle);  // null, 1 and 2: the default stream of the device
Stream* default_of(int device);
void order(Stream* before, Stream* after);  // what is queued before what will be
int here();  // the place where the program is; to be called without the lock
// ready: whether it can run without waiting for other processes.
void put(Stream* stream, std::function<void()> run, int place = 0, std::function<bool()> ready = nullptr);
void run_until(Stream* stream, const bool& done);  // the program has not waited
void drain(Stream* stream, const Mark* until = nullptr);  // and the program has waited
void drain_all();
int current_device();
int device_count();

// ---- memory --------------------------------------------------------------------------
struct Block {
    char* address;
    size_t bytes;
    int device;  // -1: pinned memory of the host
};
const Block* block_of(const void* pointer);  // the one that holds it, or null
bool on_device(const void* pointer);
bool pinned(const void* pointer);
extern char* const region;  // where all blocks lie
constexpr size_t REGION_BYTES = size_t(1) << 40;

// ---- races ---------------------------------------------------------------------------
void begin_task(Stream* stream, const Task& task);
void read(const void* pointer, size_t bytes);
void write(const void* pointer, size_t bytes);
void forget(const Block& block);

// ---- figures -------------------------------------------------------------------------
// In the order of control.py's COUNTERS.
enum Counter {
    LAUNCH, MALLOC, FREE, HOST_MALLOC, HOST_FREE, QUERY, NOT_READY, EVENT_CREATE, EVENT_DESTROY,
    SYNCHRONIZE, COPY, COMPILE, ELAPSED, ELAPSED_NOT_READY, GENERATOR_CREATE, RACE, COUNTERS
};
extern long counters[COUNTERS];
bool fails(Counter which);  // counts a call; whether it was chosen to fail
extern const bool idle;  // EMU_IDLE: kernels and copies change nothing

const std::string& home();  // where build.py has put everything
[[noreturn]] void die(const std::string& why);

}  // namespace emu
