// Streams and events: queues of work that runs late, in any order that they allow.
#include "core.h"
#include <set>
#include <algorithm>
#include <chrono>
#include <dlfcn.h>
#include <map>
#include <random>

namespace emu {

static bool set(const char* name) {
    const char* value = getenv(name);
    return value && *value && strcmp(value, "0");
}

std::recursive_mutex mutex;
long counters[COUNTERS];
static long failing[COUNTERS];  // calls until one fails; 0: none does
const bool idle = set("EMU_IDLE");
const bool watching = set("EMU_RACES");
Clocks program{};

enum class Mode { EAGER, LAZY, RANDOM };
static Mode mode_of(const char* name) {
    if (name && !strcmp(name, "eager")) return Mode::EAGER;
    if (name && !strcmp(name, "lazy")) return Mode::LAZY;
    return Mode::RANDOM;
}
static Mode mode = mode_of(getenv("EMU_MODE"));
static std::mt19937 dice(getenv("EMU_SEED") ? atoi(getenv("EMU_SEED")) : 0);

void die(const std::string& why) {
    fprintf(stderr, "emulator: %s\n", why.c_str());
    abort();
}

const std::string& home() {
    static const std::string path = [] {
        Dl_info info;
        dladdr((void*)&home, &info);
        std::string file = info.dli_fname;
        return file.substr(0, file.rfind('/')) + "/..";
    }();
    return path;
}

bool fails(Counter which) {
    counters[which]++;
    return failing[which] && !--failing[which];
}

// ---- devices and their streams -------------------------------------------------------
static thread_local int device = 0;
int current_device() { return device; }

static const int devices = getenv("EMU_DEVICES") ? atoi(getenv("EMU_DEVICES")) : 1;
int device_count() { return devices; }
static std::vector<Stream*> streams;  // never deleted, for marks refer to them
static std::vector<Stream*> defaults;  // one of each device

static int free_slot() {
    std::array<bool, SLOTS> taken{};
    for (Stream* stream : streams) if (!stream->dead) taken[stream->slot] = true;
    for (int slot = 1; slot < SLOTS; slot++) if (!taken[slot]) return slot;
    if (watching) die("more streams than clocks; raise SLOTS in core.h");
    return SLOTS - 1;
}

static Stream* make_stream(int of_device, bool blocking) {
    Stream* stream = new Stream;
    stream->device = of_device;
    stream->slot = free_slot();
    stream->blocking = blocking;
    stream->clocks[stream->slot] = program[stream->slot];
    streams.push_back(stream);
    return stream;
}

Stream* stream_of(const void* handle) {
    if ((uintptr_t)handle > 2) return (Stream*)handle;
    return default_of(device);
}

Stream* default_of(int of_device) {
    while ((int)defaults.size() < devices) defaults.push_back(make_stream(defaults.size(), true));
    return defaults[of_device];
}

// ---- when work runs ------------------------------------------------------------------
static double now() {
    return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

static void finish(Stream* stream, const Mark* until);

static std::map<long, std::function<bool()>> meetings;  // with other processes: whether they are ready

static void run_first(Stream* stream) {
    Task task = std::move(stream->tasks.front());
    stream->tasks.pop_front();
    meetings.erase(task.meeting);
    if (task.after) {
        if (!task.after->done) finish(task.after->stream, task.after.get());
        join(stream->clocks, task.after->clocks);
    }
    if (!task.run) return;
    begin_task(stream, task);
    task.run();
}

static void finish(Stream* stream, const Mark* until) {
    while (!stream->tasks.empty() && !(until && until->done)) run_first(stream);
}

void run_until(Stream* stream, const bool& done) {
    while (!stream->tasks.empty() && !done) run_first(stream);
}

void drain(Stream* stream, const Mark* until) {
    finish(stream, until);
    join(program, until ? until->clocks : stream->clocks);
}

void drain_all() {
    for (Stream* stream : streams) drain(stream);
}

// Whether running a task may wait for another process, which may wait for this program.
static bool waits(const Task& task) {
    if (task.meeting && !meetings[task.meeting]()) return true;
    return task.after && !task.after->done &&
        std::any_of(meetings.begin(), meetings.end(), [](auto& meeting) { return !meeting.second(); });
}

static void run_some(Stream* stream, size_t most) {
    for (; most && !stream->tasks.empty() && !(!meetings.empty() && waits(stream->tasks.front())); most--) run_first(stream);
}

// The devices make some progress, or none.
static void progress() {
    if (mode == Mode::EAGER) for (Stream* stream : streams) run_some(stream, SIZE_MAX);
    if (mode != Mode::RANDOM || streams.empty() || dice() % 4) return;
    Stream* stream = streams[dice() % streams.size()];
    run_some(stream, dice() % 6);
}

static std::shared_ptr<Mark> mark(Stream* stream) {
    auto made = std::make_shared<Mark>();
    made->stream = stream;
    auto run = [made, stream] {
        made->when = now();
        made->clocks = stream->clocks;
        made->done = true;
    };
    stream->tasks.push_back({run, nullptr, nullptr});
    return made;
}

void order(Stream* before, Stream* after) {
    if (before->tasks.empty()) join(after->clocks, before->clocks);
    else after->tasks.push_back({nullptr, mark(before), nullptr});
}

void put(Stream* stream, std::function<void()> run, int place, std::function<bool()> ready) {
    Stream* main = defaults.empty() ? nullptr : defaults[stream->device];
    if (stream == main) {
        for (Stream* other : streams)
            if (other != main && other->blocking && !other->dead && other->device == stream->device)
                order(other, stream);
    } else if (stream->blocking && main) {
        order(main, stream);
    }
    auto issued = watching ? std::make_shared<Clocks>(program) : nullptr;
    static long number = 0;
    long meeting = ready ? ++number : 0;
    if (meeting) meetings[meeting] = std::move(ready);
    stream->tasks.push_back({std::move(run), nullptr, issued, place, meeting});
    progress();
}

static int (*find_place)() = nullptr;
int here() { return watching && find_place ? find_place() : 0; }

struct Event {
    std::shared_ptr<Mark> mark;
    bool timing = true;
};
static std::set<const void*> events;  // those that have not been destroyed
static Event* event_of(cudaEvent_t handle) { return events.count(handle) ? (Event*)handle : nullptr; }

static cudaError_t new_stream(cudaStream_t* out, unsigned flags) {
    Lock lock(mutex);
    stream_of(nullptr);
    *out = (cudaStream_t)make_stream(device, !(flags & cudaStreamNonBlocking));
    return cudaSuccess;
}

}  // namespace emu

using namespace emu;

extern "C" {
void emu_counts(long* out) { memcpy(out, counters, sizeof counters); }
void emu_schedule(const char* name, unsigned seed) {
    Lock lock(mutex);
    mode = mode_of(name);
    dice.seed(seed);
}
void emu_fail(int which, long call) {
    Lock lock(mutex);
    failing[which] = call;
}
void emu_find_places(int (*find)()) { find_place = find; }

cudaError_t cudaGetDeviceCount(int* out) { *out = devices; return cudaSuccess; }
cudaError_t cudaGetDevice(int* out) { *out = device; return cudaSuccess; }
cudaError_t cudaSetDevice(int chosen) {
    if (chosen < 0 || chosen >= devices) return cudaErrorInvalidDevice;
    device = chosen;
    return cudaSuccess;
}

cudaError_t cudaStreamCreate(cudaStream_t* out) { return new_stream(out, 0); }
cudaError_t cudaStreamCreateWithFlags(cudaStream_t* out, unsigned flags) { return new_stream(out, flags); }
cudaError_t cudaStreamCreateWithPriority(cudaStream_t* out, unsigned flags, int) { return new_stream(out, flags); }
cudaError_t cudaStreamDestroy(cudaStream_t handle) {
    Lock lock(mutex);
    Stream* stream = stream_of(handle);
    finish(stream, nullptr);
    stream->dead = true;
    return cudaSuccess;
}
cudaError_t cudaStreamSynchronize(cudaStream_t handle) {
    Lock lock(mutex);
    counters[SYNCHRONIZE]++;
    put(stream_of(handle), nullptr);  // behind what the default stream orders
    drain(stream_of(handle));
    return cudaSuccess;
}
cudaError_t cudaStreamQuery(cudaStream_t handle) {
    Lock lock(mutex);
    progress();
    Stream* stream = stream_of(handle);
    if (!stream->tasks.empty()) return cudaErrorNotReady;
    join(program, stream->clocks);
    return cudaSuccess;
}
cudaError_t cudaStreamIsCapturing(cudaStream_t, cudaStreamCaptureStatus* out) {
    *out = cudaStreamCaptureStatusNone;
    return cudaSuccess;
}
cudaError_t cudaStreamGetPriority(cudaStream_t, int* out) { *out = 0; return cudaSuccess; }
cudaError_t cudaStreamWaitEvent(cudaStream_t handle, cudaEvent_t event, unsigned) {
    Lock lock(mutex);
    if (!event_of(event)) return cudaErrorInvalidResourceHandle;
    auto& last = event_of(event)->mark;
    if (last) stream_of(handle)->tasks.push_back({nullptr, last, nullptr});
    progress();
    return cudaSuccess;
}
cudaError_t cudaDeviceSynchronize() {
    Lock lock(mutex);
    counters[SYNCHRONIZE]++;
    for (Stream* stream : streams) if (stream->device == device) drain(stream);
    return cudaSuccess;
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t* out, unsigned flags) {
    Lock lock(mutex);
    counters[EVENT_CREATE]++;
    Event* event = new Event;
    event->timing = !(flags & cudaEventDisableTiming);
    *out = (cudaEvent_t)event;
    events.insert(event);
    return cudaSuccess;
}
cudaError_t cudaEventCreate(cudaEvent_t* out) { return cudaEventCreateWithFlags(out, 0); }
cudaError_t cudaEventDestroy(cudaEvent_t event) {
    Lock lock(mutex);
    counters[EVENT_DESTROY]++;
    if (!events.erase(event)) return cudaErrorInvalidResourceHandle;
    delete (Event*)event;
    return cudaSuccess;
}
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t handle) {
    Lock lock(mutex);
    if (!event_of(event)) return cudaErrorInvalidResourceHandle;
    put(stream_of(handle), nullptr);
    event_of(event)->mark = mark(stream_of(handle));
    progress();
    return cudaSuccess;
}
cudaError_t cudaEventQuery(cudaEvent_t event) {
    Lock lock(mutex);
    counters[QUERY]++;
    progress();
    if (!event_of(event)) return cudaErrorInvalidResourceHandle;
    auto& last = event_of(event)->mark;
    if (!last) return cudaSuccess;
    if (last->done) { join(program, last->clocks); return cudaSuccess; }
    counters[NOT_READY]++;
    return cudaErrorNotReady;
}
cudaError_t cudaEventSynchronize(cudaEvent_t event) {
    Lock lock(mutex);
    counters[SYNCHRONIZE]++;
    if (!event_of(event)) return cudaErrorInvalidResourceHandle;
    auto last = event_of(event)->mark;
    if (last) drain(last->stream, last.get());
    return cudaSuccess;
}
cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t first, cudaEvent_t last) {
    Lock lock(mutex);
    counters[ELAPSED]++;
    Event *a = event_of(first), *b = event_of(last);
    if (!a || !b || !a->timing || !b->timing || !a->mark || !b->mark) return cudaErrorInvalidResourceHandle;
    if (!a->mark->done || !b->mark->done) { counters[ELAPSED_NOT_READY]++; return cudaErrorNotReady; }
    *milliseconds = (b->mark->when - a->mark->when) * 1e3;
    return cudaSuccess;
}
cudaError_t cudaEventElapsedTime_v2(float* milliseconds, cudaEvent_t first, cudaEvent_t last) {
    return cudaEventElapsedTime(milliseconds, first, last);
}
}
