/* A libnvidia-ml.so.1 without a GPU, beside fake_driver.cpp: says that there is one H200, and nothing more. */
#include <string.h>

typedef struct {
    unsigned long long total, free, used;
} memory_of;

int nvmlInitWithFlags(unsigned flags) { return (void)flags, 0; }
int nvmlInit_v2(void) { return 0; }
int nvmlShutdown(void) { return 0; }
int nvmlDeviceGetCount_v2(unsigned *count) { return *count = 1, 0; }
int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **handle) { return *handle = (void *)1, index ? 2 : 0; }
int nvmlDeviceGetCudaComputeCapability(void *handle, int *major, int *minor) {
    return (void)handle, *major = 9, *minor = 0, 0;
}
int nvmlDeviceGetName(void *handle, char *name, unsigned size) {
    return (void)handle, strncpy(name, "NVIDIA H200", size), 0;
}
int nvmlDeviceGetUUID(void *handle, char *text, unsigned size) { return (void)handle, strncpy(text, "GPU-0", size), 0; }
int nvmlDeviceGetMemoryInfo(void *handle, memory_of *memory) {
    (void)handle;
    memory->total = memory->free = 143771ull << 20;
    memory->used = 0;
    return 0;
}
