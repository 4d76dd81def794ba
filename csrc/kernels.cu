// Gathers scattered KV blocks into a packed buffer on the device, and scatters the buffer again: a block of many small
// pieces then crosses the link as one copy. NVRTC compiles the file at run time, so the file includes no header; `make
// cuda` compiles the file for all targets.
//
// Launch a thread block for each (block, piece): grid (blocks, pieces). Packed block i of the list lies at the place of
// host block i. `Piece` is stc_piece of staccato_memory.h; the members of a piece must be multiples of 16.

struct Piece {
    unsigned long long device_offset, device_stride, host_offset, host_stride, bytes;
};

__device__ static void copy_words(uint4* to, const uint4* from, unsigned long long bytes) {
    for (unsigned long long word = threadIdx.x; word < bytes / sizeof(uint4); word += blockDim.x) to[word] = from[word];
}

extern "C" __global__ void gather_blocks(char* packed, const char* device, const Piece* pieces,
                                         const unsigned* blocks) {
    const Piece piece = pieces[blockIdx.y];
    char* to = packed + piece.host_offset + blockIdx.x * piece.host_stride;
    const char* from = device + piece.device_offset + blocks[blockIdx.x] * piece.device_stride;
    copy_words(reinterpret_cast<uint4*>(to), reinterpret_cast<const uint4*>(from), piece.bytes);
}

extern "C" __global__ void scatter_blocks(const char* packed, char* device, const Piece* pieces,
                                          const unsigned* blocks) {
    const Piece piece = pieces[blockIdx.y];
    const char* from = packed + piece.host_offset + blockIdx.x * piece.host_stride;
    char* to = device + piece.device_offset + blocks[blockIdx.x] * piece.device_stride;
    copy_words(reinterpret_cast<uint4*>(to), reinterpret_cast<const uint4*>(from), piece.bytes);
}
