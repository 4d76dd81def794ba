// What the driver's calls for virtual memory cost: by page size (A), behind a running kernel (B), and for a thread that
// launches kernels meanwhile (C). `driver_calls GIB ROUNDS` prints a line of JSON for each case, and numbers as
// [least, median, most] of the rounds. bench_driver_calls.py builds and runs it. C++, because an interpreter's lock
// between two threads would be measured along with the driver's.
#include <dlfcn.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#include "../../../csrc/cuda_driver.h"

using namespace staccato::cuda;

namespace {

constexpr uint64_t MIB = 1 << 20, GIB = 1 << 30;

[[noreturn]] void give_up(const char* what, const char* why) {
    std::fprintf(stderr, "%s: %s\n", what, why);
    std::exit(1);
}

void check(cudaError_t result, const char* what) {
    if (result != cudaSuccess) give_up(what, cudaGetErrorString(result));
}

Driver load_driver() {
    void* library = dlopen("libcuda.so.1", RTLD_NOW);
    if (!library) give_up("this machine has no CUDA driver", dlerror());
    Driver driver{};
#define FIND(name, symbol, arguments)                                             \
    driver.name = reinterpret_cast<Result(*) arguments>(dlsym(library, symbol)); \
    if (!driver.name) give_up(symbol, "the CUDA driver is too old to have it");
    STACCATO_CUDA_FUNCTIONS(FIND)
    return driver;
}

}  // namespace

const Driver& staccato::cuda::driver() {
    static const Driver loaded = load_driver();
    return loaded;
}

namespace {

void check(Result result, const char* what) {
    if (result == SUCCESS) return;
    const char* why = nullptr;
    driver().error_string(result, &why);
    give_up(what, why ? why : "unknown error");
}

// -- kernels ----------------------------------------------------------------------------------------------------------

__global__ void tiny() {}

__device__ unsigned long long nanoseconds() {
    unsigned long long now;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
    return now;
}

__global__ void spin(unsigned long long length_ns, volatile int* started) {
    const unsigned long long begin = nanoseconds();
    *started = 1;
    __threadfence_system();
    while (nanoseconds() - begin < length_ns) {
    }
}

// -- times and numbers ------------------------------------------------------------------------------------------------

using Clock = std::chrono::steady_clock;

double microseconds(Clock::time_point begin, Clock::time_point end) {
    return std::chrono::duration<double, std::micro>(end - begin).count();
}

template <typename Work>
double timed(Work work) {
    const auto begin = Clock::now();
    work();
    return microseconds(begin, Clock::now());
}

double quantile(std::vector<double> values, double part) {
    const auto at = values.begin() + std::min<size_t>(values.size() - 1, static_cast<size_t>(values.size() * part));
    std::nth_element(values.begin(), at, values.end());
    return *at;
}

// One line of JSON.
class Row {
  public:
    explicit Row(const char* measure) { out_ << std::boolalpha << "{\"measure\": \"" << measure << '"'; }

    template <typename Value>
    Row& add(const std::string& name, Value value) {
        out_ << ", \"" << name << "\": " << value;
        return *this;
    }
    Row& add(const std::string& name, const char* text) { return add(name, '"' + std::string(text) + '"'); }
    Row& add(const std::string& name, const std::vector<double>& rounds) {
        char text[100];
        std::snprintf(text, sizeof text, "[%.4g, %.4g, %.4g]", quantile(rounds, 0), quantile(rounds, 0.5),
                      quantile(rounds, 1));
        return add(name, std::string(text));
    }
    void print() {
        std::printf("%s}\n", out_.str().c_str());
        std::fflush(stdout);
    }

  private:
    std::ostringstream out_;
};

// -- pages as the memory library has them: made once, then mapped and unmapped ----------------------------------------

class Pages {
  public:
    Pages(uint64_t page_bytes, uint64_t count, bool exportable) : page_bytes(page_bytes), handles_(count) {
        properties_.type = ALLOCATION_PINNED;
        properties_.handle_types = exportable ? unsigned{HANDLE_POSIX_FD} : 0u;
        properties_.location = {LOCATION_DEVICE, 0};
        check(driver().address_reserve(&base_, bytes(), page_bytes, 0, 0), "cuMemAddressReserve");
    }
    Pages(const Pages&) = delete;
    ~Pages() { check(driver().address_free(base_, bytes()), "cuMemAddressFree"); }

    uint64_t count() const { return handles_.size(); }
    uint64_t bytes() const { return count() * page_bytes; }

    void create(uint64_t i) { check(driver().page_create(&handles_[i], page_bytes, &properties_, 0), "cuMemCreate"); }
    void release(uint64_t i) { check(driver().page_release(handles_[i]), "cuMemRelease"); }
    void map(uint64_t i) { check(driver().map(at(i), page_bytes, 0, handles_[i], 0), "cuMemMap"); }
    void unmap(uint64_t i) { check(driver().unmap(at(i), page_bytes), "cuMemUnmap"); }
    void allow(uint64_t i, uint64_t count) {
        const AccessDescription access{{LOCATION_DEVICE, 0}, ACCESS_READ_WRITE};
        check(driver().set_access(at(i), count * page_bytes, &access, 1), "cuMemSetAccess");
    }
    Result unmap_at_once() { return driver().unmap(base_, bytes()); }

    template <typename Call>
    void each(Call call) {
        for (uint64_t i = 0; i < count(); i++) call(i);
    }

    const uint64_t page_bytes;

  private:
    Address at(uint64_t i) const { return base_ + i * page_bytes; }

    AllocationProperties properties_{};
    Address base_ = 0;
    std::vector<PageHandle> handles_;
};

// -- A ----------------------------------------------------------------------------------------------------------------

// Microseconds a page; what is called once for all pages is divided by their number.
void page_cost(uint64_t page_bytes, bool exportable, uint64_t total_bytes, int rounds) {
    std::map<std::string, std::vector<double>> us;
    const uint64_t count = std::max<uint64_t>(1, total_bytes / page_bytes);
    Result refused = SUCCESS;
    for (int round = 0; round < rounds; round++) {
        Pages pages(page_bytes, count, exportable);
        auto time = [&](const char* name, auto work) { us[name].push_back(timed(work) / count); };
        time("create_us", [&] { pages.each([&](uint64_t i) { pages.create(i); }); });
        time("map_us", [&] { pages.each([&](uint64_t i) { pages.map(i); }); });
        time("access_us", [&] { pages.each([&](uint64_t i) { pages.allow(i, 1); }); });
        time("unmap_us", [&] { pages.each([&](uint64_t i) { pages.unmap(i); }); });
        time("map_again_us", [&] { pages.each([&](uint64_t i) { pages.map(i); }); });
        time("access_at_once_us", [&] { pages.allow(0, count); });
        time("unmap_at_once_us", [&] { refused = pages.unmap_at_once(); });
        if (refused) pages.each([&](uint64_t i) { pages.unmap(i); });
        time("release_us", [&] { pages.each([&](uint64_t i) { pages.release(i); }); });
    }
    Row row("page cost");
    row.add("page_mib", page_bytes / MIB).add("exportable", exportable).add("pages", count).add("rounds", rounds);
    row.add("unmap_at_once_error", refused);
    for (const auto& [name, values] : us) row.add(name, values);
    row.print();
}

// -- B ----------------------------------------------------------------------------------------------------------------

// Microseconds a call, each on a page that the kernel does not touch, while the kernel runs or with none.
void behind_a_kernel(uint64_t page_bytes, bool running, int rounds) {
    constexpr unsigned long long KERNEL_NS = 200'000'000;
    std::map<std::string, std::vector<double>> us;
    cudaStream_t stream;
    int* started;
    check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "cudaStreamCreate");
    check(cudaMallocHost(&started, sizeof *started), "cudaMallocHost");
    int outlived = 0;
    for (int round = 0; round < rounds; round++) {
        Pages page(page_bytes, 1, false);
        auto time = [&](const char* name, auto work) { us[name].push_back(timed(work)); };
        *static_cast<volatile int*>(started) = !running;
        if (running) spin<<<1, 1, 0, stream>>>(KERNEL_NS, started);
        check(cudaGetLastError(), "launch of the long kernel");
        while (!*static_cast<volatile int*>(started)) {
        }
        time("create_us", [&] { page.create(0); });
        time("map_us", [&] { page.map(0); });
        time("access_us", [&] { page.allow(0, 1); });
        time("unmap_us", [&] { page.unmap(0); });
        time("release_us", [&] { page.release(0); });
        outlived += cudaStreamQuery(stream) == cudaErrorNotReady;
        check(cudaStreamSynchronize(stream), "the long kernel");
    }
    check(cudaFreeHost(started), "cudaFreeHost");
    check(cudaStreamDestroy(stream), "cudaStreamDestroy");
    Row row("behind a kernel");
    row.add("page_mib", page_bytes / MIB).add("kernel_ms", running ? KERNEL_NS / 1'000'000 : 0);
    row.add("rounds", rounds).add("rounds_the_kernel_outlived", outlived);
    for (const auto& [name, values] : us) row.add(name, values);
    row.print();
}

// -- C ----------------------------------------------------------------------------------------------------------------

// Maps and unmaps without a pause, which is the worst that a scale-up can do to the one who launches.
class Mapper {
  public:
    explicit Mapper(uint64_t page_bytes) : pages_(page_bytes, POOL_BYTES / page_bytes, false) {
        pages_.each([&](uint64_t i) { pages_.create(i); });
    }
    ~Mapper() {
        pages_.each([&](uint64_t i) { pages_.release(i); });
    }

    // GiB mapped and unmapped a second while `work` was going on.
    template <typename Work>
    double during(Work work) {
        std::atomic<bool> stop{false};
        uint64_t turns = 0;
        std::thread thread([&] {
            check(cudaSetDevice(0), "cudaSetDevice");
            for (; !stop; turns++) {
                pages_.each([&](uint64_t i) { pages_.map(i); });
                pages_.allow(0, pages_.count());
                pages_.each([&](uint64_t i) { pages_.unmap(i); });
            }
        });
        const double us = timed([&] {
            work();
            stop = true;
            thread.join();
        });
        return turns * (POOL_BYTES / static_cast<double>(GIB)) / (us / 1e6);
    }

  private:
    static constexpr uint64_t POOL_BYTES = 2 * GIB;
    Pages pages_;
};

// Rounds of one case; microseconds.
struct Launches {
    uint64_t count = 0;
    std::map<std::string, std::vector<double>> us;
    std::vector<double> mapped_gib_s;

    template <typename Launch>
    void round(cudaStream_t stream, Launch launch) {
        constexpr double LENGTH_US = 5e5;
        std::vector<double> calls, trips;
        const auto begin = Clock::now();
        for (auto now = begin; microseconds(begin, now) < LENGTH_US; now = Clock::now()) {
            launch();
            const auto launched = Clock::now();
            check(cudaStreamSynchronize(stream), "the launched kernels");
            calls.push_back(microseconds(now, launched));
            trips.push_back(microseconds(now, Clock::now()));
        }
        count += calls.size();
        note("call", calls);
        note("round_trip", trips);
    }

    void note(const std::string& name, const std::vector<double>& values) {
        us[name + "_p50_us"].push_back(quantile(values, 0.5));
        us[name + "_p99_us"].push_back(quantile(values, 0.99));
        us[name + "_most_us"].push_back(quantile(values, 1));
    }
};

// The cases take turns in each round, so that what else the machine does falls on all of them.
template <typename Launch>
void launching(const char* work, cudaStream_t stream, int rounds, Launch launch) {
    const std::vector<uint64_t> cases = {0, 2 * MIB, 32 * MIB};  // page size of who maps meanwhile; 0: nobody
    std::map<uint64_t, Launches> seen;
    for (int round = 0; round < rounds; round++) {
        for (uint64_t page_bytes : cases) {
            Launches& launches = seen[page_bytes];
            auto measure = [&] { launches.round(stream, launch); };
            if (page_bytes == 0) {
                measure();
            } else {
                launches.mapped_gib_s.push_back(Mapper(page_bytes).during(measure));
            }
        }
    }
    for (uint64_t page_bytes : cases) {
        const Launches& launches = seen[page_bytes];
        Row row("launch");
        row.add("work", work).add("mapping", page_bytes > 0).add("page_mib", page_bytes / MIB);
        row.add("rounds", rounds).add("launches", launches.count);
        if (page_bytes > 0) row.add("mapped_gib_s", launches.mapped_gib_s);
        for (const auto& [name, values] : launches.us) row.add(name, values);
        row.print();
    }
}

void launch_jitter(int rounds) {
    constexpr int KERNELS = 64;
    cudaStream_t stream;
    cudaGraph_t graph;
    cudaGraphExec_t replayable;
    check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "cudaStreamCreate");
    check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), "cudaStreamBeginCapture");
    for (int i = 0; i < KERNELS; i++) tiny<<<1, 1, 0, stream>>>();
    check(cudaStreamEndCapture(stream, &graph), "cudaStreamEndCapture");
    check(cudaGraphInstantiate(&replayable, graph, 0), "cudaGraphInstantiate");
    auto kernel = [&] {
        tiny<<<1, 1, 0, stream>>>();
        check(cudaGetLastError(), "launch of a kernel");
    };
    auto replay = [&] { check(cudaGraphLaunch(replayable, stream), "cudaGraphLaunch"); };
    kernel();  // what is loaded at the first use is loaded now
    replay();
    check(cudaStreamSynchronize(stream), "the first kernels");
    launching("kernel", stream, rounds, kernel);
    launching("graph of 64 kernels", stream, rounds, replay);
    check(cudaGraphExecDestroy(replayable), "cudaGraphExecDestroy");
    check(cudaGraphDestroy(graph), "cudaGraphDestroy");
    check(cudaStreamDestroy(stream), "cudaStreamDestroy");
}

}  // namespace

int main(int count, char** arguments) {
    const uint64_t gib = count > 1 ? std::strtoull(arguments[1], nullptr, 10) : 0;
    const int rounds = count > 2 ? std::atoi(arguments[2]) : 0;
    if (gib == 0 || rounds <= 0) {
        std::fprintf(stderr, "usage: driver_calls GIB ROUNDS, both 1 or more\n");
        return 2;
    }
    check(cudaSetDevice(0), "cudaSetDevice");
    check(cudaFree(nullptr), "the first call to the device");
    for (uint64_t page_mib : {2, 4, 8, 16, 32, 64, 128, 256, 512, 1024}) {
        for (bool exportable : {false, true}) page_cost(page_mib * MIB, exportable, gib * GIB, rounds);
    }
    for (uint64_t page_mib : {2, 32, 256}) {
        for (bool running : {false, true}) behind_a_kernel(page_mib * MIB, running, rounds);
    }
    launch_jitter(rounds);
    return 0;
}
