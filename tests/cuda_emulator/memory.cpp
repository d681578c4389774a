// Memory of the devices and pinned memory: one region of addresses, blocks of whole pages.
#include "core.h"
#include <map>
#include <signal.h>
#include <sys/mman.h>

namespace emu {

constexpr size_t PAGE = 4096;

static char* reserve() {
    void* address = mmap(nullptr, REGION_BYTES, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (address == MAP_FAILED) die("no addresses for the memory of the devices");
    return (char*)address;
}
char* const region = reserve();

static std::map<const char*, Block> blocks;
static std::multimap<size_t, char*> spare;  // freed addresses, by size
static size_t reached = 0;  // of the region
static size_t used[64], highest[64], host_used;
static long long synchronous_bytes = 0;
static const double gibibytes = getenv("EMU_TOTAL") ? atof(getenv("EMU_TOTAL")) : 8.0;
static const size_t total_bytes = size_t(gibibytes * (1 << 30));

const Block* block_of(const void* pointer) {
    auto after = blocks.upper_bound((const char*)pointer);
    if (after == blocks.begin()) return nullptr;
    const Block& block = (--after)->second;
    return (const char*)pointer < block.address + block.bytes ? &block : nullptr;
}
bool on_device(const void* pointer) {
    const Block* block = block_of(pointer);
    return block && block->device >= 0;
}
bool pinned(const void* pointer) {
    const Block* block = block_of(pointer);
    return block && block->device < 0;
}

static size_t pages(size_t bytes) { return (bytes + PAGE - 1) / PAGE * PAGE; }

// New memory is full of nonsense; between blocks lies a page that nobody may touch.
static void* take(size_t bytes, int of_device, int nonsense) {
    size_t size = pages(bytes);
    char* address;
    auto found = spare.find(size);
    if (found != spare.end()) {
        address = found->second;
        spare.erase(found);
    } else {
        if (reached + size + PAGE > REGION_BYTES) return nullptr;
        address = region + reached;
        reached += size + PAGE;
    }
    if (mprotect(address, size, PROT_READ | PROT_WRITE)) return nullptr;
    if (!idle) memset(address, nonsense, size);
    blocks[address] = {address, bytes, of_device};
    return address;
}

static Block give(void* pointer) {
    auto found = blocks.find((char*)pointer);
    if (found == blocks.end()) die("freed what was not allocated");
    Block block = found->second;
    size_t size = pages(block.bytes);
    forget(block);
    madvise(block.address, size, MADV_DONTNEED);
    mprotect(block.address, size, PROT_NONE);
    spare.emplace(size, block.address);
    blocks.erase(found);
    return block;
}

// ---- addresses without memory, and memory that is mapped behind them -----------------
struct Handle { size_t bytes; int device; bool released = false; const char* mapped = nullptr; };
static std::map<unsigned long long, Handle> handles;
static std::map<const char*, unsigned long long> mapped;  // handles, by address
static unsigned long long last_handle = 0;
static std::multimap<size_t, char*> unreserved;  // freed addresses, by size
static const size_t granule = getenv("EMU_GRANULE") ? atol(getenv("EMU_GRANULE")) : PAGE;

static void forget_handle(unsigned long long number) {
    auto found = handles.find(number);
    if (!found->second.released || found->second.mapped) return;
    used[found->second.device] -= found->second.bytes;
    handles.erase(found);
}

static void told(int, siginfo_t* info, void*) {
    const char* address = (const char*)info->si_addr;
    signal(SIGSEGV, SIG_DFL);
    if (address >= region && address < region + REGION_BYTES)
        die("memory of a device was touched that is not allocated (freed before its last use?)");
}
static const bool handled = [] {
    struct sigaction action {};
    action.sa_sigaction = told;
    action.sa_flags = SA_SIGINFO;
    return sigaction(SIGSEGV, &action, nullptr) == 0;
}();

static void move(void* to, const void* from, size_t bytes) {
    if (idle) return;
    read(from, bytes);
    write(to, bytes);
    memmove(to, from, bytes);
}

static void to_program(void* to, const void* from, size_t bytes) {
    synchronous_bytes += bytes;
    if (!idle) memmove(to, from, bytes);
    else if (!on_device(to)) memset(to, bytes <= 8, bytes);  // small ones are true
}

}  // namespace emu

using namespace emu;

extern "C" {
size_t emu_device_bytes() { return used[current_device()]; }
size_t emu_device_peak() {  // since last asked
    size_t& peak = highest[current_device()];
    size_t result = peak;
    peak = used[current_device()];
    return result;
}
size_t emu_host_bytes() { return host_used; }
long long emu_synchronous_bytes() { return synchronous_bytes; }

cudaError_t cudaMalloc(void** out, size_t bytes) {
    Lock lock(mutex);
    int device = current_device();
    *out = nullptr;
    if (fails(MALLOC)) return cudaErrorMemoryAllocation;
    if (!bytes) return cudaSuccess;
    if (used[device] + bytes > total_bytes) return cudaErrorMemoryAllocation;
    *out = take(bytes, device, 0xff);
    if (!*out) return cudaErrorMemoryAllocation;
    used[device] += bytes;
    if (used[device] > highest[device]) highest[device] = used[device];
    return cudaSuccess;
}
cudaError_t cudaFree(void* pointer) {
    Lock lock(mutex);
    if (!pointer) return cudaSuccess;
    counters[FREE]++;
    drain_all();  // as CUDA does
    Block block = give(pointer);
    used[block.device] -= block.bytes;
    return cudaSuccess;
}

// As CUDA's driver, which orders nothing: what is unmapped too early is touched in vain.
struct Location { int type, id; };
struct Property { int type, handles; Location location; };
struct Access { Location location; int flags; };
int cuMemGetAllocationGranularity(size_t* out, const Property*, int) {
    *out = granule;
    return 0;
}
int cuMemAddressReserve(unsigned long long* out, size_t bytes, size_t, unsigned long long, unsigned long long) {
    Lock lock(mutex);
    if (!bytes || bytes % granule) return 1;
    auto found = unreserved.find(bytes);
    if (found != unreserved.end()) {
        *out = (unsigned long long)found->second;
        unreserved.erase(found);
        return 0;
    }
    size_t begin = (reached + granule - 1) / granule * granule;
    if (begin + bytes + PAGE > REGION_BYTES) return 2;
    *out = (unsigned long long)(region + begin);
    reached = begin + bytes + PAGE;
    return 0;
}
int cuMemAddressFree(unsigned long long address, size_t bytes) {
    Lock lock(mutex);
    auto first = mapped.lower_bound((const char*)address);
    if (first != mapped.end() && first->first < (const char*)address + bytes) die("freed addresses with memory behind them");
    unreserved.emplace(bytes, (char*)address);
    return 0;
}
int cuMemCreate(unsigned long long* out, size_t bytes, const Property* property, unsigned long long) {
    Lock lock(mutex);
    int device = property->location.id;
    if (fails(MALLOC) || used[device] + bytes > total_bytes) return 2;
    if (!bytes || bytes % granule) return 1;
    used[device] += bytes;
    if (used[device] > highest[device]) highest[device] = used[device];
    handles[*out = ++last_handle] = {bytes, device};
    return 0;
}
int cuMemRelease(unsigned long long number) {
    Lock lock(mutex);
    counters[FREE]++;
    handles.at(number).released = true;
    forget_handle(number);
    return 0;
}
int cuMemMap(unsigned long long address, size_t bytes, size_t, unsigned long long number, unsigned long long) {
    Lock lock(mutex);
    Handle& handle = handles.at(number);
    char* where = (char*)address;
    auto after = mapped.lower_bound(where);
    if (handle.mapped || handle.bytes != bytes || (after != mapped.end() && after->first < where + bytes)) return 1;
    handle.mapped = where;
    mapped[where] = number;
    return 0;
}
int cuMemSetAccess(unsigned long long address, size_t bytes, const Access* access, size_t) {
    Lock lock(mutex);
    if (access->flags != 3 || mprotect((void*)address, bytes, PROT_READ | PROT_WRITE)) return 1;
    if (!idle) memset((void*)address, 0xff, bytes);
    blocks[(char*)address] = {(char*)address, bytes, access->location.id};
    return 0;
}
int cuMemUnmap(unsigned long long address, size_t bytes) {
    Lock lock(mutex);
    const char* end = (const char*)address + bytes;
    for (auto found = mapped.lower_bound((const char*)address); found != mapped.end() && found->first < end;) {
        Handle& handle = handles.at(found->second);
        if (found->first + handle.bytes > end) return 1;
        Block block = {(char*)found->first, handle.bytes, handle.device};
        forget(block);
        madvise(block.address, block.bytes, MADV_DONTNEED);
        mprotect(block.address, block.bytes, PROT_NONE);
        blocks.erase(block.address);
        handle.mapped = nullptr;
        unsigned long long number = found->second;
        found = mapped.erase(found);
        forget_handle(number);
    }
    return 0;
}
cudaError_t cudaHostAlloc(void** out, size_t bytes, unsigned) {
    Lock lock(mutex);
    *out = nullptr;
    if (fails(HOST_MALLOC)) return cudaErrorMemoryAllocation;
    *out = take(bytes ? bytes : 1, -1, 0xee);
    if (!*out) return cudaErrorMemoryAllocation;
    host_used += bytes;
    return cudaSuccess;
}
cudaError_t cudaFreeHost(void* pointer) {
    Lock lock(mutex);
    if (!pointer) return cudaSuccess;
    counters[HOST_FREE]++;
    drain_all();
    host_used -= give(pointer).bytes;
    return cudaSuccess;
}
cudaError_t cudaMemGetInfo(size_t* free_bytes, size_t* all) {
    *free_bytes = total_bytes - used[current_device()];
    *all = total_bytes;
    return cudaSuccess;
}

cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind, cudaStream_t handle) {
    int place = here();
    Lock lock(mutex);
    if (fails(COPY)) return cudaErrorIllegalAddress;
    Stream* stream = stream_of(handle);
    bool late = (on_device(to) || pinned(to)) && (on_device(from) || pinned(from));
    if (late) {
        const Block *target = block_of(to), *source = block_of(from);
        int other = source->device == stream->device ? target->device : source->device;
        // Between devices, the default stream waits for both, and both wait for it.
        bool apart = other >= 0 && other != stream->device && stream == default_of(stream->device);
        if (apart) {
            put(default_of(other), nullptr);
            order(default_of(other), stream);
        }
        put(stream, [=] { move(to, from, bytes); }, place);
        if (apart) order(stream, default_of(other));
    } else if (on_device(to)) {  // from pageable memory: staged at once
        auto staged = std::make_shared<std::string>(idle ? "" : std::string((const char*)from, bytes));
        put(stream, [=] { if (!idle) { write(to, bytes); memcpy(to, staged->data(), bytes); } }, place);
    } else {  // to pageable memory: waits
        counters[SYNCHRONIZE]++;
        put(stream, [=] { if (!idle) read(from, bytes); }, place);
        drain(stream);
        to_program(to, from, bytes);
    }
    return cudaSuccess;
}
cudaError_t cudaMemcpy(void* to, const void* from, size_t bytes, cudaMemcpyKind kind) {
    Lock lock(mutex);
    cudaError_t error = cudaMemcpyAsync(to, from, bytes, kind, nullptr);
    counters[SYNCHRONIZE]++;
    drain(stream_of(nullptr));
    return error;
}
cudaError_t cudaMemcpyPeerAsync(void* to, int, const void* from, int, size_t bytes, cudaStream_t stream) {
    return cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, stream);
}
cudaError_t cudaMemcpyPeer(void* to, int, const void* from, int, size_t bytes) {
    return cudaMemcpy(to, from, bytes, cudaMemcpyDefault);
}
cudaError_t cudaDeviceCanAccessPeer(int* out, int, int) { *out = 1; return cudaSuccess; }
cudaError_t cudaDeviceEnablePeerAccess(int, unsigned) { return cudaSuccess; }
cudaError_t cudaMemsetAsync(void* to, int value, size_t bytes, cudaStream_t stream) {
    int place = here();
    Lock lock(mutex);
    put(stream_of(stream), [=] { if (!idle) { write(to, bytes); memset(to, value, bytes); } }, place);
    return cudaSuccess;
}
cudaError_t cudaMemset(void* to, int value, size_t bytes) { return cudaMemsetAsync(to, value, bytes, nullptr); }
cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* out, const void* pointer) {
    Lock lock(mutex);
    *out = {};
    const Block* block = block_of(pointer);
    out->type = !block ? cudaMemoryTypeUnregistered : block->device < 0 ? cudaMemoryTypeHost : cudaMemoryTypeDevice;
    out->device = block && block->device > 0 ? block->device : 0;
    out->devicePointer = (void*)pointer;
    return cudaSuccess;
}

const char* cudaGetErrorName(cudaError_t error) {
    switch (error) {
        case cudaErrorNotReady: return "cudaErrorNotReady";
        case cudaErrorMemoryAllocation: return "cudaErrorMemoryAllocation";
        case cudaErrorInvalidValue: return "cudaErrorInvalidValue";
        case cudaErrorInvalidDevice: return "cudaErrorInvalidDevice";
        case cudaErrorInvalidResourceHandle: return "cudaErrorInvalidResourceHandle";
        case cudaErrorIllegalAddress: return "cudaErrorIllegalAddress";
        case cudaErrorLaunchFailure: return "cudaErrorLaunchFailure";
        default: return "cudaErrorNotInTheEmulator";
    }
}
const char* cudaGetErrorString(cudaError_t error) { return cudaGetErrorName(error); }
cudaError_t cudaGetLastError() { return cudaSuccess; }
cudaError_t cudaPeekAtLastError() { return cudaSuccess; }
cudaError_t cudaDriverGetVersion(int* out) { *out = CUDART_VERSION; return cudaSuccess; }
cudaError_t cudaRuntimeGetVersion(int* out) { *out = CUDART_VERSION; return cudaSuccess; }
cudaError_t cudaDeviceGetAttribute(int* out, cudaDeviceAttr which, int) {
    switch (which) {
        case cudaDevAttrMaxThreadsPerBlock: *out = 1024; break;
        case cudaDevAttrMaxGridDimX: *out = 65535; break;
        case cudaDevAttrMaxSharedMemoryPerBlock: *out = 49152; break;
        case cudaDevAttrWarpSize: *out = 32; break;
        case cudaDevAttrMultiProcessorCount: *out = 132; break;
        case cudaDevAttrComputeCapabilityMajor: *out = 9; break;
        case cudaDevAttrComputeCapabilityMinor: *out = 0; break;
        case cudaDevAttrMemoryPoolsSupported: *out = 0; break;
        default: *out = 1024;
    }
    return cudaSuccess;
}
cudaError_t cudaGetDeviceProperties(cudaDeviceProp* out, int) {
    *out = {};
    strcpy(out->name, "CUDA emulator");
    out->totalGlobalMem = total_bytes;
    out->multiProcessorCount = 132;
    out->major = 9;
    out->maxThreadsPerBlock = 1024;
    out->warpSize = 32;
    return cudaSuccess;
}
}
