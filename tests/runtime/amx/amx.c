/* Intel's matrix instructions (AMX) for processors without them, for tests.
 *
 * The library is preloaded. The processor raises SIGILL at an instruction of AMX; the handler computes the instruction
 * and goes on behind it. Programs find AMX by `cpuid` and `xgetbv`, which no processor traps here: amx_patch writes a
 * trapping instruction in their place, and the handler answers with the bits of AMX set. The kernel's permission to use
 * the tiles is granted by a `syscall` of this file.
 *
 * Known after Intel's Software Developer's Manual: AMX-TILE, AMX-INT8, AMX-BF16. Any other unknown instruction ends the
 * process as it would without this file. */
#define _GNU_SOURCE
#include <cpuid.h>
#include <dlfcn.h>
#include <errno.h>
#include <signal.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <ucontext.h>
#include <unistd.h>

enum { TILES = 8, ROWS = 16, ROW_BYTES = 64, SITES_MOST = 4096 };
enum { CPUID_BYTES = 2, XGETBV_BYTES = 3 };
enum { XCOMP_SUPPORTED = 0x1021, XCOMP_PERMITTED = 0x1022, XCOMP_REQUEST = 0x1023 };
enum { TILE_STATES = 3 << 17 }; /* the states XTILECFG and XTILEDATA of XCR0 */

typedef struct {
    uint8_t palette, start_row, reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
} Config; /* as `ldtilecfg` reads it: 64 bytes */

typedef struct {
    Config config;
    uint8_t tile[TILES][ROWS][ROW_BYTES];
} Tiles;

static __thread Tiles tiles __attribute__((tls_model("initial-exec")));
static struct { uintptr_t at; int bytes; } sites[SITES_MOST];
static int sites_known;
static uint64_t computed; /* matrix products so far, of all threads */

/* Put a trap in place of an instruction.
 *
 * at: address of a `cpuid` (bytes: 2) or an `xgetbv` (bytes: 3) in loaded code.
 * Returns 0, or -1 if the address holds another instruction, the table is full or the page can't be written. */
int amx_patch(uintptr_t at, int bytes) {
    const char *expected = bytes == CPUID_BYTES ? "\x0f\xa2" : "\x0f\x01\xd0";
    const uintptr_t page = at & ~(uintptr_t)4095, end = at + (uintptr_t)bytes;
    if (sites_known == SITES_MOST || memcmp((void *)at, expected, (size_t)bytes) != 0) return -1;
    if (mprotect((void *)page, end - page, PROT_READ | PROT_WRITE | PROT_EXEC) != 0) return -1;
    sites[sites_known].at = at;
    sites[sites_known++].bytes = bytes;
    memcpy((void *)at, "\x0f\x0b\x90", (size_t)bytes); /* ud2, nop */
    return mprotect((void *)page, end - page, PROT_READ | PROT_EXEC);
}

/* Number of matrix products that this process has computed. */
uint64_t amx_computed(void) { return __atomic_load_n(&computed, __ATOMIC_RELAXED); }

static void answer_cpuid(greg_t *registers) {
    const uint32_t leaf = (uint32_t)registers[REG_RAX], part = (uint32_t)registers[REG_RCX];
    uint32_t a, b, c, d;
    __cpuid_count(leaf, part, a, b, c, d);
    if (leaf == 0 && a < 0x1e) a = 0x1e;
    /* AMX-BF16, AVX512-FP16 (oneDNN uses AMX beside AVX512-FP16 alone), AMX-TILE, AMX-INT8 */
    if (leaf == 7 && part == 0) d |= 1u << 22 | 1u << 23 | 1u << 24 | 1u << 25;
    if (leaf == 0xd && part == 0) a |= TILE_STATES;
    if (leaf == 0x1d) {
        a = part == 0 ? 1 : TILES * ROWS * ROW_BYTES | (uint32_t)(ROWS * ROW_BYTES) << 16;
        b = part == 0 ? 0 : ROW_BYTES | TILES << 16;
        c = part == 0 ? 0 : ROWS;
        d = 0;
    }
    if (leaf == 0x1e) a = 0, b = ROWS | ROW_BYTES << 8, c = 0, d = 0;
    registers[REG_RAX] = a, registers[REG_RBX] = b, registers[REG_RCX] = c, registers[REG_RDX] = d;
}

static void answer_xgetbv(greg_t *registers) {
    uint32_t a, d;
    __asm__ volatile("xgetbv" : "=a"(a), "=d"(d) : "c"((uint32_t)registers[REG_RCX]));
    if ((uint32_t)registers[REG_RCX] == 0) a |= TILE_STATES;
    registers[REG_RAX] = a, registers[REG_RDX] = d;
}

static int answer_site(greg_t *registers) {
    for (int site = 0; site < sites_known; site++)
        if (sites[site].at == (uintptr_t)registers[REG_RIP]) {
            (sites[site].bytes == CPUID_BYTES ? answer_cpuid : answer_xgetbv)(registers);
            registers[REG_RIP] += sites[site].bytes;
            return 1;
        }
    return 0;
}

/* An instruction: VEX.128.0F38 with one to three operands. */
typedef struct {
    int prefix, opcode, mode, reg, rm, vvvv; /* prefix: 0 none, 1 66, 2 F3, 3 F2 */
    uintptr_t base;                          /* memory: base and displacement */
    uint64_t index;                          /* memory: index times scale */
    int bytes;                               /* length of the instruction */
} Instruction;

static uint64_t general(const greg_t *registers, int number) {
    static const int order[16] = {REG_RAX, REG_RCX, REG_RDX, REG_RBX, REG_RSP, REG_RBP, REG_RSI, REG_RDI,
                                  REG_R8,  REG_R9,  REG_R10, REG_R11, REG_R12, REG_R13, REG_R14, REG_R15};
    return (uint64_t)registers[order[number]];
}

static int read_instruction(const greg_t *registers, Instruction *read) {
    const uint8_t *code = (const uint8_t *)registers[REG_RIP], *start = code;
    if (code[0] != 0xc4 || (code[1] & 0x1f) != 2 || (code[2] & 0x84) != 0) return 0; /* W0, 128 bits */
    const int high_reg = !(code[1] & 0x80), high_index = !(code[1] & 0x40), high_base = !(code[1] & 0x20);
    read->vvvv = ~code[2] >> 3 & 15;
    read->prefix = code[2] & 3;
    read->opcode = code[3];
    read->mode = code[4] >> 6;
    read->reg = (code[4] >> 3 & 7) | high_reg << 3;
    read->rm = code[4] & 7;
    read->base = read->index = 0;
    code += 5;
    if (read->mode != 3) {
        int32_t wide = 0;
        int base = read->rm | high_base << 3, far = read->mode == 2, from_next = 0;
        if (read->rm == 4) {
            const int index = (*code >> 3 & 7) | high_index << 3, low = *code & 7;
            if (index != 4) read->index = general(registers, index) << (*code >> 6);
            base = low | high_base << 3;
            if (low == 5 && read->mode == 0) base = -1, far = 1;
            code++;
        } else if (read->rm == 5 && read->mode == 0) {
            base = -1, far = from_next = 1;
        }
        if (far) memcpy(&wide, code, 4), code += 4;
        else if (read->mode == 1) wide = (int8_t)*code++;
        if (from_next) read->base = (uintptr_t)code;
        else if (base >= 0) read->base = general(registers, base);
        read->base += (uint64_t)(int64_t)wide;
    }
    read->bytes = (int)(code - start);
    return 1;
}

static float of_bf16(const uint8_t *at) {
    uint16_t half;
    uint32_t bits;
    float value;
    memcpy(&half, at, 2);
    bits = (uint32_t)half << 16;
    memcpy(&value, &bits, 4);
    return value;
}

static void product_bf16(int to, int left, int right) {
    const int columns = tiles.config.row_bytes[to] / 4, depth = tiles.config.row_bytes[left] / 4;
    for (int row = 0; row < tiles.config.rows[to]; row++)
        for (int column = 0; column < columns; column++) {
            float sums[2] = {0, 0}, value;
            for (int k = 0; k < depth; k++)
                for (int half = 0; half < 2; half++)
                    sums[half] = __builtin_fmaf(of_bf16(&tiles.tile[left][row][4 * k + 2 * half]),
                                                of_bf16(&tiles.tile[right][k][4 * column + 2 * half]), sums[half]);
            memcpy(&value, &tiles.tile[to][row][4 * column], 4);
            value += sums[0] + sums[1];
            memcpy(&tiles.tile[to][row][4 * column], &value, 4);
        }
}

static int32_t of_byte(uint8_t byte, int is_signed) { return is_signed ? (int8_t)byte : byte; }

static void product_int8(int to, int left, int right, int left_signed, int right_signed) {
    const int columns = tiles.config.row_bytes[to] / 4, depth = tiles.config.row_bytes[left] / 4;
    for (int row = 0; row < tiles.config.rows[to]; row++)
        for (int column = 0; column < columns; column++) {
            uint32_t sum;
            memcpy(&sum, &tiles.tile[to][row][4 * column], 4);
            for (int k = 0; k < depth; k++)
                for (int i = 0; i < 4; i++)
                    sum += (uint32_t)(of_byte(tiles.tile[left][row][4 * k + i], left_signed) *
                                      of_byte(tiles.tile[right][k][4 * column + i], right_signed));
            memcpy(&tiles.tile[to][row][4 * column], &sum, 4);
        }
}

static void clear(int tile, int from_row) {
    for (int row = from_row; row < ROWS; row++) memset(tiles.tile[tile][row], 0, ROW_BYTES);
}

static void load(int tile, uintptr_t at, uint64_t stride) {
    for (int row = 0; row < tiles.config.rows[tile]; row++, at += stride) {
        memset(tiles.tile[tile][row], 0, ROW_BYTES);
        memcpy(tiles.tile[tile][row], (void *)at, tiles.config.row_bytes[tile]);
    }
    clear(tile, tiles.config.rows[tile]);
}

static void store(int tile, uintptr_t at, uint64_t stride) {
    for (int row = 0; row < tiles.config.rows[tile]; row++, at += stride)
        memcpy((void *)at, tiles.tile[tile][row], tiles.config.row_bytes[tile]);
}

static void finish_product(int to) {
    for (int row = 0; row < tiles.config.rows[to]; row++)
        memset(&tiles.tile[to][row][tiles.config.row_bytes[to]], 0, ROW_BYTES - tiles.config.row_bytes[to]);
    clear(to, tiles.config.rows[to]);
    __atomic_fetch_add(&computed, 1, __ATOMIC_RELAXED);
}

static int compute_tile(const Instruction *is) {
    enum { NONE, P66, PF3, PF2 };
    const int reg = is->reg & 7, left = is->rm & 7, right = is->vvvv & 7;
    switch (is->opcode) {
    case 0x49:
        if (is->mode == 3 && is->prefix == PF2) clear(reg, 0);
        else if (is->mode == 3 && is->prefix == NONE) memset(&tiles, 0, sizeof tiles);
        else if (is->mode != 3 && is->prefix == NONE) {
            memset(&tiles, 0, sizeof tiles);
            memcpy(&tiles.config, (void *)(is->base + is->index), sizeof tiles.config);
        } else if (is->mode != 3 && is->prefix == P66)
            memcpy((void *)(is->base + is->index), &tiles.config, sizeof tiles.config);
        else return 0;
        return 1;
    case 0x4b:
        if (is->mode == 3 || is->prefix == NONE) return 0;
        (is->prefix == PF3 ? store : load)(reg, is->base, is->index);
        return 1;
    case 0x5c:
        if (is->mode != 3 || is->prefix != PF3) return 0;
        product_bf16(reg, left, right);
        break;
    case 0x5e: /* left, right: F2 both signed, F3 the left one, 66 the right one, none */
        if (is->mode != 3) return 0;
        product_int8(reg, left, right, is->prefix == PF2 || is->prefix == PF3, is->prefix == PF2 || is->prefix == P66);
        break;
    default:
        return 0;
    }
    finish_product(reg);
    return 1;
}

static void say_unknown(const uint8_t *code) {
    char line[128];
    int length = snprintf(line, sizeof line, "amx: unknown instruction at %p:", (const void *)code);
    for (int byte = 0; byte < 11; byte++) length += snprintf(line + length, sizeof line - (size_t)length, " %02x", code[byte]);
    line[length++] = '\n';
    if (write(STDERR_FILENO, line, (size_t)length) < 0) _exit(1);
}

static void trapped(int number, siginfo_t *info, void *context) {
    greg_t *registers = ((ucontext_t *)context)->uc_mcontext.gregs;
    Instruction is;
    (void)info;
    if (answer_site(registers)) return;
    if (read_instruction(registers, &is) && compute_tile(&is)) {
        registers[REG_RIP] += is.bytes;
        return;
    }
    say_unknown((const uint8_t *)registers[REG_RIP]);
    signal(number, SIG_DFL); /* the instruction traps again and ends the process */
}

typedef int Sigaction(int, const struct sigaction *, struct sigaction *);

static Sigaction *real_sigaction(void) { return (Sigaction *)dlsym(RTLD_NEXT, "sigaction"); }

/* No other handler of SIGILL comes in place of this file's. */
int sigaction(int number, const struct sigaction *wanted, struct sigaction *before) {
    return real_sigaction()(number, number == SIGILL ? NULL : wanted, before);
}

/* The kernel's answers about the tiles' permission, and every other system call as it is. */
long syscall(long number, ...) {
    long given[6];
    va_list list;
    va_start(list, number);
    for (int at = 0; at < 6; at++) given[at] = va_arg(list, long);
    va_end(list);
    if (number == SYS_arch_prctl && (given[0] == XCOMP_SUPPORTED || given[0] == XCOMP_PERMITTED)) {
        *(uint64_t *)given[1] = TILE_STATES | 7;
        return 0;
    }
    if (number == SYS_arch_prctl && given[0] == XCOMP_REQUEST) return 0;
    register long fourth __asm__("r10") = given[3], fifth __asm__("r8") = given[4], sixth __asm__("r9") = given[5];
    long result;
    __asm__ volatile("syscall"
                     : "=a"(result)
                     : "a"(number), "D"(given[0]), "S"(given[1]), "d"(given[2]), "r"(fourth), "r"(fifth), "r"(sixth)
                     : "rcx", "r11", "memory");
    if (result < 0 && result > -4096) {
        errno = (int)-result;
        return -1;
    }
    return result;
}

__attribute__((constructor)) static void begin(void) {
    struct sigaction wanted = {.sa_sigaction = trapped, .sa_flags = SA_SIGINFO | SA_NODEFER};
    if (real_sigaction()(SIGILL, &wanted, NULL) != 0) abort();
}
