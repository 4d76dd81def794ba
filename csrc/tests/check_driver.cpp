// Our declarations of the CUDA driver beside NVIDIA's own: compiled where cuda.h is, never run.
#include <cuda.h>

#include <string_view>
#include <type_traits>

#include "../cuda_driver.h"

namespace ours = staccato::cuda;

// The same size, and members at the same places.
#define SAME_SIZE(our, their) static_assert(sizeof(our) == sizeof(their), #their)
#define SAME_PLACE(our, our_member, their, their_member) \
    static_assert(offsetof(our, our_member) == offsetof(their, their_member), #their "." #their_member)

SAME_SIZE(ours::Result, CUresult);
SAME_SIZE(ours::DeviceNumber, CUdevice);
SAME_SIZE(ours::Address, CUdeviceptr);
SAME_SIZE(ours::PageHandle, CUmemGenericAllocationHandle);
SAME_SIZE(ours::Context, CUcontext);
SAME_SIZE(ours::Stream, CUstream);
SAME_SIZE(ours::EventHandle, CUevent);
SAME_SIZE(ours::Location, CUmemLocation);
SAME_PLACE(ours::Location, id, CUmemLocation, id);
SAME_SIZE(ours::AllocationProperties, CUmemAllocationProp);
SAME_PLACE(ours::AllocationProperties, handle_types, CUmemAllocationProp, requestedHandleTypes);
SAME_PLACE(ours::AllocationProperties, location, CUmemAllocationProp, location);
SAME_PLACE(ours::AllocationProperties, win32, CUmemAllocationProp, win32HandleMetaData);
SAME_PLACE(ours::AllocationProperties, flags, CUmemAllocationProp, allocFlags);
SAME_SIZE(ours::AccessDescription, CUmemAccessDesc);
SAME_PLACE(ours::AccessDescription, flags, CUmemAccessDesc, flags);
SAME_SIZE(ours::Copy2D, CUDA_MEMCPY2D);
SAME_PLACE(ours::Copy2D, source.x_bytes, CUDA_MEMCPY2D, srcXInBytes);
SAME_PLACE(ours::Copy2D, source.y, CUDA_MEMCPY2D, srcY);
SAME_PLACE(ours::Copy2D, source.memory_type, CUDA_MEMCPY2D, srcMemoryType);
SAME_PLACE(ours::Copy2D, source.host, CUDA_MEMCPY2D, srcHost);
SAME_PLACE(ours::Copy2D, source.device, CUDA_MEMCPY2D, srcDevice);
SAME_PLACE(ours::Copy2D, source.pitch, CUDA_MEMCPY2D, srcPitch);
SAME_PLACE(ours::Copy2D, target.memory_type, CUDA_MEMCPY2D, dstMemoryType);
SAME_PLACE(ours::Copy2D, target.host, CUDA_MEMCPY2D, dstHost);
SAME_PLACE(ours::Copy2D, target.device, CUDA_MEMCPY2D, dstDevice);
SAME_PLACE(ours::Copy2D, target.pitch, CUDA_MEMCPY2D, dstPitch);
SAME_PLACE(ours::Copy2D, width, CUDA_MEMCPY2D, WidthInBytes);
SAME_PLACE(ours::Copy2D, height, CUDA_MEMCPY2D, Height);

#define SAME_VALUE(our, their) static_assert(static_cast<int>(ours::our) == static_cast<int>(their), #their)
SAME_VALUE(SUCCESS, CUDA_SUCCESS);
SAME_VALUE(OUT_OF_MEMORY, CUDA_ERROR_OUT_OF_MEMORY);
SAME_VALUE(DEINITIALIZED, CUDA_ERROR_DEINITIALIZED);
SAME_VALUE(ECC_UNCORRECTABLE, CUDA_ERROR_ECC_UNCORRECTABLE);
SAME_VALUE(NOT_READY, CUDA_ERROR_NOT_READY);
SAME_VALUE(ILLEGAL_ADDRESS, CUDA_ERROR_ILLEGAL_ADDRESS);
SAME_VALUE(LAUNCH_TIMEOUT, CUDA_ERROR_LAUNCH_TIMEOUT);
SAME_VALUE(ASSERT, CUDA_ERROR_ASSERT);
SAME_VALUE(HARDWARE_STACK_ERROR, CUDA_ERROR_HARDWARE_STACK_ERROR);
SAME_VALUE(LAUNCH_FAILED, CUDA_ERROR_LAUNCH_FAILED);
SAME_VALUE(UNKNOWN, CUDA_ERROR_UNKNOWN);
SAME_VALUE(ATTRIBUTE_VIRTUAL_MEMORY, CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED);
SAME_VALUE(STREAM_NON_BLOCKING, CU_STREAM_NON_BLOCKING);
SAME_VALUE(EVENT_BLOCKING_SYNC, CU_EVENT_BLOCKING_SYNC);
SAME_VALUE(EVENT_DISABLE_TIMING, CU_EVENT_DISABLE_TIMING);
SAME_VALUE(HOST_REGISTER_PORTABLE, CU_MEMHOSTREGISTER_PORTABLE);
SAME_VALUE(GRANULARITY_MINIMUM, CU_MEM_ALLOC_GRANULARITY_MINIMUM);
SAME_VALUE(ALLOCATION_PINNED, CU_MEM_ALLOCATION_TYPE_PINNED);
SAME_VALUE(LOCATION_DEVICE, CU_MEM_LOCATION_TYPE_DEVICE);
SAME_VALUE(HANDLE_POSIX_FD, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR);
SAME_VALUE(ACCESS_READ_WRITE, CU_MEM_ACCESS_FLAGS_PROT_READWRITE);
SAME_VALUE(MEMORY_HOST, CU_MEMORYTYPE_HOST);
SAME_VALUE(MEMORY_DEVICE, CU_MEMORYTYPE_DEVICE);

// The argument lists: same number, each of the same size and kind; and the symbol, which cuda.h's macros expand to.
template <typename Ours, typename Theirs>
constexpr bool alike() {
    return sizeof(Ours) == sizeof(Theirs) && std::is_pointer_v<Ours> == std::is_pointer_v<Theirs> &&
           std::is_pointer_v<Theirs> == !(std::is_integral_v<Theirs> || std::is_enum_v<Theirs>);
}
template <typename... Ours, typename... Theirs>
constexpr bool check(ours::Result (*)(Ours...), CUresult (*)(Theirs...)) {
    return (alike<Ours, Theirs>() && ...);
}
namespace symbols {
#define DEFINE(name, symbol, arguments) constexpr std::string_view name = symbol;
STACCATO_CUDA_FUNCTIONS(DEFINE)
}  // namespace symbols
#define TEXT(expanded) #expanded
#define SYMBOL(name) TEXT(name)
#define SAME_FUNCTION(our, their)                                                                         \
    static_assert(check(decltype(ours::Driver::our){}, static_cast<decltype(&their)>(nullptr)), #their); \
    static_assert(symbols::our == SYMBOL(their), #their);
#define COMPARED(X)                               \
    X(init, cuInit)                               \
    X(error_string, cuGetErrorString)             \
    X(device_get, cuDeviceGet)                    \
    X(device_attribute, cuDeviceGetAttribute)     \
    X(context_retain, cuDevicePrimaryCtxRetain)   \
    X(context_release, cuDevicePrimaryCtxRelease) \
    X(context_push, cuCtxPushCurrent)             \
    X(context_pop, cuCtxPopCurrent)               \
    X(can_access, cuDeviceCanAccessPeer)          \
    X(memory_info, cuMemGetInfo)                  \
    X(allocate, cuMemAlloc)                       \
    X(deallocate, cuMemFree)                      \
    X(granularity, cuMemGetAllocationGranularity) \
    X(address_reserve, cuMemAddressReserve)       \
    X(address_free, cuMemAddressFree)             \
    X(page_create, cuMemCreate)                   \
    X(page_release, cuMemRelease)                 \
    X(page_export, cuMemExportToShareableHandle)  \
    X(map, cuMemMap)                              \
    X(unmap, cuMemUnmap)                          \
    X(set_access, cuMemSetAccess)                 \
    X(stream_create, cuStreamCreate)              \
    X(stream_destroy, cuStreamDestroy)            \
    X(stream_synchronize, cuStreamSynchronize)    \
    X(stream_wait_event, cuStreamWaitEvent)       \
    X(event_create, cuEventCreate)                \
    X(event_destroy, cuEventDestroy)              \
    X(event_record, cuEventRecord)                \
    X(event_query, cuEventQuery)                  \
    X(event_synchronize, cuEventSynchronize)      \
    X(copy_to_device, cuMemcpyHtoDAsync)          \
    X(copy_to_host, cuMemcpyDtoHAsync)            \
    X(copy_on_devices, cuMemcpyDtoDAsync)         \
    X(copy_2d, cuMemcpy2DAsync)                   \
    X(fill, cuMemsetD8Async)                      \
    X(host_register, cuMemHostRegister)           \
    X(host_unregister, cuMemHostUnregister)
COMPARED(SAME_FUNCTION)

#define COUNT(...) +1
static_assert(0 COMPARED(COUNT) == 0 STACCATO_CUDA_FUNCTIONS(COUNT), "a function of the driver is not compared");
