// Gathers scattered KV blocks into one packed buffer on the device, and back: a block of many small pieces then crosses
// the link as one copy. Compiled at run time by NVRTC, so it includes nothing; `make cuda` tries it for all targets.
//
// Launch with one thread block for each (block, piece): grid (blocks, pieces). Block i of the list lies packed where a
// host block of number i would: `Piece` is stc_piece of staccato_memory.h; its members are multiples of 16.

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
