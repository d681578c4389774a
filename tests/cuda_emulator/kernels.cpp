// The driver and NVRTC: g++ compiles kernels, and threads that wait for each other are fibers.
#include "core.h"
#include <algorithm>
#include <dlfcn.h>
#include <fstream>
#include <iterator>
#include <regex>
#include <set>
#include <sys/stat.h>
#include <unistd.h>

using namespace emu;

// ---- one block of threads ------------------------------------------------------------
struct Index { unsigned x, y, z; };
extern "C" {
Index emu_thread, emu_block, emu_block_size, emu_grid_size;
alignas(64) char emu_dynamic_shared[1 << 17];
unsigned long long emu_lanes[1024];  // what the threads of a warp show each other
}

enum class State { READY, AT_WARP, AT_BLOCK, DONE };
struct Fiber {
    void* top;  // of its stack, while another one runs
    char* stack;
    Index thread;
    State state;
};
constexpr size_t STACK_BYTES = 1 << 16;
static std::vector<Fiber> fibers;
static unsigned current;
static void* scheduler;
static void (*body)(void*);
static void* arguments;

// Unlike swapcontext it leaves the signal mask alone, which would be a system call.
asm(R"(
.text
emu_switch:
    pushq %rbp
    pushq %rbx
    pushq %r12
    pushq %r13
    pushq %r14
    pushq %r15
    movq %rsp, (%rdi)
    movq %rsi, %rsp
    popq %r15
    popq %r14
    popq %r13
    popq %r12
    popq %rbx
    popq %rbp
    ret
)");
extern "C" void emu_switch(void** left, void* entered);
constexpr int SAVED = 6;  // registers

static void run_fiber() {
    body(arguments);
    fibers[current].state = State::DONE;
    emu_switch(&fibers[current].top, scheduler);
}

static void wait_at(State where) {
    fibers[current].state = where;
    emu_switch(&fibers[current].top, scheduler);
}

// Warps whose threads have all come to a place go on; else the block does.
static void let_go(unsigned threads) {
    bool moved = false;
    for (unsigned first = 0; first < threads; first += 32) {
        auto begin = fibers.begin() + first, end = fibers.begin() + std::min(first + 32, threads);
        for (auto fiber = begin; fiber != end; ++fiber) {
            if (fiber->state != State::AT_WARP) continue;
            fiber->state = State::READY;
            moved = true;
        }
    }
    if (moved) return;
    for (unsigned i = 0; i < threads; i++)
        if (fibers[i].state == State::AT_BLOCK) fibers[i].state = State::READY;
}

extern "C" {
void emu_sync_block() { wait_at(State::AT_BLOCK); }
void emu_sync_warp() { wait_at(State::AT_WARP); }
unsigned emu_lane() { return current; }

void emu_run_block(void (*function)(void*), void* given) {
    body = function;
    arguments = given;
    const Index size = emu_block_size;
    unsigned threads = size.x * size.y * size.z;
    while (fibers.size() < threads) fibers.push_back({nullptr, (char*)aligned_alloc(64, STACK_BYTES)});
    for (unsigned i = 0; i < threads; i++) {
        Fiber& fiber = fibers[i];
        fiber.state = State::READY;
        fiber.thread = {i % size.x, i / size.x % size.y, i / size.x / size.y};
        void** top = (void**)(fiber.stack + STACK_BYTES) - 2;
        *top = (void*)run_fiber;  // where the first switch returns to
        fiber.top = top - SAVED;
    }
    for (bool ran = true; ran;) {
        ran = false;
        for (unsigned i = 0; i < threads; i++) {
            if (fibers[i].state != State::READY) continue;
            current = i;
            emu_thread = fibers[i].thread;
            emu_switch(&scheduler, fibers[i].top);
            ran = true;
        }
        if (ran) let_go(threads);
    }
}
}

// ---- driver --------------------------------------------------------------------------
struct Kernel {
    void* (*pack)(void**);  // copies the arguments
    void (*run)(void*, const unsigned*);  // runs the grid and forgets them
};

extern "C" {
int cuGetErrorName(int, const char** out) { *out = "CUDA_ERROR_OF_THE_EMULATOR"; return 0; }
int cuGetErrorString(int, const char** out) { *out = "see standard error"; return 0; }
int cuCtxGetCurrent(void** out) { *out = (void*)1; return 0; }
int cuCtxSetCurrent(void*) { return 0; }
int cuCtxGetDevice(int* out) { *out = current_device(); return 0; }
int cuDeviceGetAttribute(int* out, int which, int device) {
    return cudaDeviceGetAttribute(out, (cudaDeviceAttr)which, device);
}
int cuModuleLoadData(void** out, const void* image) {  // the image is the name of a shared object
    *out = dlopen((const char*)image, RTLD_NOW | RTLD_LOCAL);
    if (!*out) fprintf(stderr, "emulator: %s\n", dlerror());
    return *out ? 0 : 200;
}
int cuModuleUnload(void*) { return 0; }
int cuModuleGetFunction(void** out, void* module, const char* name) {
    auto pack = (void* (*)(void**))dlsym(module, (std::string(name) + "__pack").c_str());
    auto run = (void (*)(void*, const unsigned*))dlsym(module, (std::string(name) + "__run").c_str());
    if (!pack || !run) {
        fprintf(stderr, "emulator: no kernel %s\n", name);
        return 500;
    }
    *out = new Kernel{pack, run};
    return 0;
}
int cuLaunchKernel(void* function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
                   unsigned, void* stream, void** parameters, void**) {
    int place = here();
    Lock lock(mutex);
    if (fails(LAUNCH)) return 719;  // CUDA_ERROR_LAUNCH_FAILED
    if (idle) { put(stream_of(stream), nullptr); return 0; }
    Kernel* kernel = (Kernel*)function;
    void* packed = kernel->pack(parameters);
    std::array<unsigned, 6> sizes{gx, gy, gz, bx, by, bz};
    put(stream_of(stream), [=] { kernel->run(packed, sizes.data()); }, place);
    return 0;
}
int cuFuncGetAttribute(int* out, int, void*) { *out = 1024; return 0; }
int cuFuncSetAttribute(void*, int, int) { return 0; }
int cuOccupancyMaxActiveBlocksPerMultiprocessor(int* out, void*, int, size_t) { *out = 2; return 0; }
int cuOccupancyMaxPotentialBlockSize(int* grid, int* block, void*, void*, size_t, int) {
    *grid = 4;
    *block = 128;
    return 0;
}
}

// ---- NVRTC ---------------------------------------------------------------------------
struct Program { std::string source, object, log; };

static std::string text_of(const std::string& path) {
    std::ifstream file(path);
    return std::string(std::istreambuf_iterator<char>(file), {});
}

// How the threads of its kernels run; see EMU_KERNEL in prelude.h.
static int how_of(const std::string& source) {
    for (const char* word : {"__syncthreads", "__syncwarp", "_sync("})
        if (source.find(word) != std::string::npos) return 2;
    return source.find("CUPY_FOR") == std::string::npos;
}

static std::string translate(const std::string& source) {
    static const std::regex shared("extern\\s+__shared__\\s+(\\w[\\w\\s]*?)\\s+(\\w+)\\s*\\[\\s*\\]");
    static const std::regex kernel(
        "extern\\s+\"C\"\\s+__global__\\s+void\\s+(?:__launch_bounds__\\s*\\([^)]*\\)\\s*)?(\\w+)\\s*\\(");
    std::set<std::string> names;
    for (std::sregex_iterator found(source.begin(), source.end(), kernel), end; found != end; ++found)
        names.insert((*found)[1]);
    bool usual = source.find("#include <cupy/complex.cuh>") < source.find_first_not_of(" \n") + 1;
    std::string text = std::string("#include \"") + (usual ? "cupy_" : "") + "prelude.h\"\n"
        + std::regex_replace(source, shared, "$1* $2 = ($1*)emu_dynamic_shared") + "\n";
    for (auto& name : names)
        text += "EMU_KERNEL(" + name + ", " + std::to_string(how_of(source)) + ")\n";
    return text;
}

static std::string hashed(const std::string& text) {
    char name[20];
    snprintf(name, sizeof name, "%zx", std::hash<std::string>()(text));
    return name;
}

extern "C" {
int nvrtcVersion(int* major, int* minor) { *major = 13; *minor = 0; return 0; }
const char* nvrtcGetErrorString(int) { return "g++ could not compile it"; }
int nvrtcCreateProgram(void** out, const char* source, const char*, int, const char**, const char**) {
    *out = new Program{source, "", ""};
    return 0;
}
int nvrtcDestroyProgram(void** program) { delete (Program*)*program; return 0; }

// Other processes compile, too: each has files of its own until they are whole.
int nvrtcCompileProgram(void* handle, int n, const char** options) {
    Lock lock(mutex);
    Program* program = (Program*)handle;
    static const std::string build = home() + "/build/", command = text_of(build + "compile.txt");
    std::string flags = command.substr(0, command.find('\n'));
    if (watching) flags += " -fsanitize=thread";
    for (int i = 0; i < n; i++) {
        std::string option = options[i];
        if (option.rfind("-I", 0) == 0 || option.rfind("-D", 0) == 0) flags += " '" + option + "'";
    }
    std::string text = translate(program->source);
    std::string base = home() + "/cache/kernels/" + hashed(text + flags + text_of(build + "prelude.h"));
    program->object = base + ".so";
    struct stat status;
    if (stat(program->object.c_str(), &status) == 0) return 0;
    counters[COMPILE]++;
    std::string mine = base + "." + std::to_string(getpid());
    std::ofstream(mine + ".cpp") << text;
    std::string compile = flags + " -c '" + mine + ".cpp' -o '" + mine + ".o' > '" + mine + ".log' 2>&1";
    // What else a kernel calls, the emulator has loaded.
    std::string link = "g++ -shared -nodefaultlibs '" + mine + ".o' -L'" + home() + "/lib' -lcudaemulator -lgcc -o '" + mine + ".so' >> '"
        + mine + ".log' 2>&1";
    std::string rename = "mv '" + mine + ".so' '" + program->object + "' && rm '" + mine + ".o' '" + mine
        + ".log' && mv '" + mine + ".cpp' '" + base + ".cpp'";
    if (system((compile + " && " + link + " && " + rename).c_str()) == 0) return 0;
    program->log = text_of(mine + ".log").substr(0, 3000);
    return 6;
}
int nvrtcGetPTXSize(void* program, size_t* out) { *out = ((Program*)program)->object.size() + 1; return 0; }
int nvrtcGetPTX(void* program, char* out) { strcpy(out, ((Program*)program)->object.c_str()); return 0; }
int nvrtcGetCUBINSize(void* program, size_t* out) { return nvrtcGetPTXSize(program, out); }
int nvrtcGetCUBIN(void* program, char* out) { return nvrtcGetPTX(program, out); }
int nvrtcGetProgramLogSize(void* program, size_t* out) { *out = ((Program*)program)->log.size() + 1; return 0; }
int nvrtcGetProgramLog(void* program, char* out) { strcpy(out, ((Program*)program)->log.c_str()); return 0; }
int nvrtcAddNameExpression(void*, const char*) { return 0; }
int nvrtcGetLoweredName(void*, const char* name, const char** out) { *out = name; return 0; }
int nvrtcGetNumSupportedArchs(int* out) { *out = 1; return 0; }
int nvrtcGetSupportedArchs(int* out) { *out = 90; return 0; }
}
