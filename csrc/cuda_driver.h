// The few functions and types of the CUDA driver in use. Declared here, so that building needs no CUDA; found in
// libcuda.so.1 when a device is opened. tests/check_driver.cpp compares the declarations with NVIDIA's cuda.h.
#pragma once
#include <cstddef>
#include <cstdint>

namespace staccato::cuda {

using Result = int;
using DeviceNumber = int;
using Address = unsigned long long;
using PageHandle = unsigned long long;
using Context = struct ContextOf*;
using Stream = struct StreamOf*;
using EventHandle = struct EventOf*;

enum : Result {
    SUCCESS = 0,
    OUT_OF_MEMORY = 2,
    DEINITIALIZED = 4,
    ECC_UNCORRECTABLE = 214,
    NOT_READY = 600,
    ILLEGAL_ADDRESS = 700,
    LAUNCH_TIMEOUT = 702,
    ASSERT = 710,
    HARDWARE_STACK_ERROR = 714,
    LAUNCH_FAILED = 719,
    UNKNOWN = 999,
};

enum : int { ATTRIBUTE_VIRTUAL_MEMORY = 102 };
enum : unsigned {
    STREAM_NON_BLOCKING = 1,
    EVENT_BLOCKING_SYNC = 1,
    EVENT_DISABLE_TIMING = 2,
    HOST_REGISTER_PORTABLE = 1,
    GRANULARITY_MINIMUM = 0,
    ALLOCATION_PINNED = 1,
    LOCATION_DEVICE = 1,
    HANDLE_POSIX_FD = 1,
    ACCESS_READ_WRITE = 3,
    MEMORY_HOST = 1,
    MEMORY_DEVICE = 2,
};

struct Location {
    unsigned type;
    int id;
};

struct AllocationProperties {
    unsigned type;
    unsigned handle_types;
    Location location;
    void* win32;
    struct {
        unsigned char compression, gpu_direct_rdma;
        unsigned short usage;
        unsigned char reserved[4];
    } flags;
};

struct AccessDescription {
    Location location;
    unsigned flags;
};

struct Side {
    size_t x_bytes, y;
    unsigned memory_type;
    const void* host;
    Address device;
    void* array;
    size_t pitch;
};

struct Copy2D {
    Side source, target;
    size_t width, height;
};

// name here, name in the library, result, arguments
#define STACCATO_CUDA_FUNCTIONS(X)                                                                                     \
    X(init, "cuInit", (unsigned))                                                                                      \
    X(error_string, "cuGetErrorString", (Result, const char**))                                                        \
    X(device_get, "cuDeviceGet", (DeviceNumber*, int))                                                                 \
    X(device_attribute, "cuDeviceGetAttribute", (int*, int, DeviceNumber))                                             \
    X(context_retain, "cuDevicePrimaryCtxRetain", (Context*, DeviceNumber))                                            \
    X(context_release, "cuDevicePrimaryCtxRelease_v2", (DeviceNumber))                                                 \
    X(context_push, "cuCtxPushCurrent_v2", (Context))                                                                  \
    X(context_pop, "cuCtxPopCurrent_v2", (Context*))                                                                   \
    X(can_access, "cuDeviceCanAccessPeer", (int*, DeviceNumber, DeviceNumber))                                         \
    X(memory_info, "cuMemGetInfo_v2", (size_t*, size_t*))                                                              \
    X(allocate, "cuMemAlloc_v2", (Address*, size_t))                                                                   \
    X(deallocate, "cuMemFree_v2", (Address))                                                                           \
    X(granularity, "cuMemGetAllocationGranularity", (size_t*, const AllocationProperties*, unsigned))                  \
    X(address_reserve, "cuMemAddressReserve", (Address*, size_t, size_t, Address, unsigned long long))                 \
    X(address_free, "cuMemAddressFree", (Address, size_t))                                                             \
    X(page_create, "cuMemCreate", (PageHandle*, size_t, const AllocationProperties*, unsigned long long))              \
    X(page_release, "cuMemRelease", (PageHandle))                                                                      \
    X(page_export, "cuMemExportToShareableHandle", (void*, PageHandle, unsigned, unsigned long long))                  \
    X(map, "cuMemMap", (Address, size_t, size_t, PageHandle, unsigned long long))                                      \
    X(unmap, "cuMemUnmap", (Address, size_t))                                                                          \
    X(set_access, "cuMemSetAccess", (Address, size_t, const AccessDescription*, size_t))                               \
    X(stream_create, "cuStreamCreate", (Stream*, unsigned))                                                            \
    X(stream_destroy, "cuStreamDestroy_v2", (Stream))                                                                  \
    X(stream_synchronize, "cuStreamSynchronize", (Stream))                                                             \
    X(stream_wait_event, "cuStreamWaitEvent", (Stream, EventHandle, unsigned))                                         \
    X(event_create, "cuEventCreate", (EventHandle*, unsigned))                                                         \
    X(event_destroy, "cuEventDestroy_v2", (EventHandle))                                                               \
    X(event_record, "cuEventRecord", (EventHandle, Stream))                                                            \
    X(event_query, "cuEventQuery", (EventHandle))                                                                      \
    X(event_synchronize, "cuEventSynchronize", (EventHandle))                                                          \
    X(copy_to_device, "cuMemcpyHtoDAsync_v2", (Address, const void*, size_t, Stream))                                  \
    X(copy_to_host, "cuMemcpyDtoHAsync_v2", (void*, Address, size_t, Stream))                                          \
    X(copy_on_devices, "cuMemcpyDtoDAsync_v2", (Address, Address, size_t, Stream))                                     \
    X(copy_2d, "cuMemcpy2DAsync_v2", (const Copy2D*, Stream))                                                          \
    X(fill, "cuMemsetD8Async", (Address, unsigned char, size_t, Stream))                                               \
    X(host_register, "cuMemHostRegister_v2", (void*, size_t, unsigned))                                                \
    X(host_unregister, "cuMemHostUnregister", (void*))

struct Driver {
#define STACCATO_DECLARE(name, symbol, arguments) Result(*name) arguments;
    STACCATO_CUDA_FUNCTIONS(STACCATO_DECLARE)
#undef STACCATO_DECLARE
};

const Driver& driver();  // throws if the machine has no driver

}  // namespace staccato::cuda
