/* The memory of one device as one pool of pages: what other languages call. Plain C, no torch, no CUDA headers.
 *
 * Every physical page of the pool is made once, when the device is opened. A model reserves addresses once and keeps
 * them; pages come and go below them. A page is in exactly one state: free, mapped, clean (mapped, its content can be
 * loaded again, so it may be given away), or limbo (to be unmapped as soon as the transfers that touch it are over).
 *
 * Handles are opaque; who opens closes. All calls are thread safe, except that nobody may use a handle while it is
 * being closed or later. Nothing calls back. Calls return 0 or a negative code, and stc_last_error() then says in one
 * sentence, for this thread, what was asked, the numbers and what to do. Nothing aborts; what touches many pages does
 * all or nothing.
 * A timeout below 0 waits without limit.                                                                            */
#pragma once
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define STC_ABI 3
#define STC_EXPORT __attribute__((visibility("default")))

typedef struct stc_device stc_device;           /* pool, move list, threads that copy, map and unmap */
typedef struct stc_reservation stc_reservation; /* addresses of one owner */
typedef struct stc_cache stc_cache;             /* memory of the host in one memfd, shared by its fd */
typedef uint64_t stc_ticket;                    /* one transfer; 0 is a transfer that is over */

enum {
    STC_OK = 0,
    STC_INVALID = -1,      /* the call makes no sense: bounds, alignment, unknown ticket */
    STC_NO_ADDRESSES = -2, /* no virtual addresses left */
    STC_NO_PAGES = -3,     /* the pool has too few free pages, and too few are on their way */
    STC_STATE = -4,        /* not now: mapped already, not mapped, still in use */
    STC_DRIVER = -5,       /* the kernel or the driver refused */
    STC_UNSUPPORTED = -6,  /* this machine can't */
    STC_NO_MEMORY = -7,    /* the host or the device has less memory than asked for */
    STC_CANCELLED = -8,
    STC_TIMEOUT = -9,
    STC_DEAD = -10 /* the device's context is broken for good: open it again in a new process */
};

/* -- device ------------------------------------------------------------------------------------------------------ */

enum { STC_BACKEND_HOST = 0, STC_BACKEND_CUDA = 1 };

typedef struct {
    uint32_t backend;
    int32_t ordinal;      /* CUDA: which device */
    uint64_t page_bytes;  /* 0: 2 MiB on the host; 32 MiB on CUDA, where mapping costs by the page, not by the byte */
    uint64_t pool_bytes;  /* rounded down to whole pages */
    uint32_t huge_folios; /* host: ask the kernel for 2 MiB folios; without them mapping is 100 times dearer */
    uint32_t exportable;  /* CUDA: pages can be handed to other processes */
    uint32_t helpers;     /* CUDA: other devices, a bit for each ordinal, whose links to the host carry loads, too */
    uint64_t relay_bytes; /* of such a device, for what passes through; 0: 32 MiB */
} stc_config;

typedef struct {
    uint64_t page_bytes, pages_total, pages_free, pages_mapped, pages_clean, pages_limbo;
    uint64_t pages_promised; /* to loads under way, not taken yet */
    uint64_t reserved_bytes; /* addresses */
    uint64_t huge_bytes;     /* of the pool, in 2 MiB folios */
    uint64_t map_calls, unmap_calls, unmap_failures, copy_calls;
    uint64_t to_device_bytes, to_host_bytes, zeroed_bytes;
    double map_s, unmap_s, copy_s;
} stc_stats;

enum { STC_PAGE_FREE = 0, STC_PAGE_MAPPED = 1, STC_PAGE_CLEAN = 2, STC_PAGE_LIMBO = 3 };

#define STC_MIXED UINT32_MAX /* of a load under way, or of one that failed in the middle */

typedef struct {
    uint32_t state;
    uint32_t owner; /* whose bytes are in it, also when it is free; 0: nobody's; STC_MIXED: several owners' */
} stc_page;

STC_EXPORT int stc_abi(void);
STC_EXPORT const char *stc_last_error(void);
STC_EXPORT int stc_device_open(const stc_config *, stc_device **out);
STC_EXPORT int stc_device_close(stc_device *); /* STC_STATE while reservations or pinned ranges live */
STC_EXPORT int stc_device_stats(stc_device *, stc_stats *out);
STC_EXPORT int stc_device_pages(stc_device *, stc_page *out, uint64_t count); /* the page map, from page 0 on */
STC_EXPORT int stc_device_settle(stc_device *, double timeout_s);             /* waits until no page is in limbo */

/* For tests and rehearsals: bytes per second in each direction (0: as fast as it goes), and the nth map, copy or unmap
 * from now on fails once (0: none). */
enum { STC_FAULT_MAP = 0, STC_FAULT_COPY = 1, STC_FAULT_UNMAP = 2 };
STC_EXPORT int stc_device_throttle(stc_device *, double bytes_per_s);
STC_EXPORT int stc_device_fault(stc_device *, int operation, uint64_t nth);

/* -- reservations ------------------------------------------------------------------------------------------------ */

typedef struct {
    uint64_t address, bytes; /* bytes rounded up to whole pages */
    uint32_t owner;          /* as in stc_page; never used again */
} stc_place;

STC_EXPORT int stc_reserve(stc_device *, uint64_t bytes, stc_reservation **out, stc_place *place);
/* Unmaps what is left and gives the addresses back. STC_STATE while it is being loaded. */
STC_EXPORT int stc_release(stc_reservation *, double timeout_s);
/* Pages for an empty range. They hold this owner's old bytes or zeroes, never another's. Waits for pages in limbo where
 * those that are free do not suffice, and for its own addresses where they are still in limbo. */
STC_EXPORT int stc_map(stc_reservation *, uint64_t offset, uint64_t bytes, double timeout_s);
/* Pages go to the move list and are free as soon as `after` and every transfer that touches them is over; returns at
 * once. What isn't mapped is passed over. */
STC_EXPORT int stc_unmap(stc_reservation *, uint64_t offset, uint64_t bytes, stc_ticket after);
/* Mapped pages become clean cache: stc_load takes them as they are, stc_unmap gives them to others. */
STC_EXPORT int stc_mark_clean(stc_reservation *, uint64_t offset, uint64_t bytes);
STC_EXPORT int stc_residency(stc_reservation *, uint64_t offset, uint64_t bytes, uint64_t *mapped, uint64_t *clean);
/* Host only: ordinary memory of the machine below whole pages that are not mapped (on = 1), for what is built at its
 * final address before any page is there, and nothing again (on = 0). stc_map and stc_load of it are STC_STATE,
 * stc_unmap passes it over, stc_release takes it away. */
STC_EXPORT int stc_scratch(stc_reservation *, uint64_t offset, uint64_t bytes, int on);
/* A file descriptor through which another process maps the page at `offset`, and where the page begins in that file. */
STC_EXPORT int stc_export_page(stc_reservation *, uint64_t offset, int *fd, uint64_t *fd_offset);

/* -- host memory ------------------------------------------------------------------------------------------------- */

/* fd < 0 makes a new file of `bytes`; else the file of another process, which stays the caller's to close. Addresses
 * only: stc_cache_commit gets memory. */
STC_EXPORT int stc_cache_open(int fd, uint64_t bytes, stc_cache **out, void **base, int *own_fd);
STC_EXPORT int stc_cache_close(stc_cache *); /* STC_STATE while transfers use it */
STC_EXPORT int stc_cache_commit(stc_cache *, uint64_t offset, uint64_t bytes, uint64_t *huge_bytes);
STC_EXPORT int stc_cache_discard(stc_cache *, uint64_t offset, uint64_t bytes); /* memory back to the machine */
/* Once in each process and range, off the hot path: committed memory the device can read at full speed. */
STC_EXPORT int stc_cache_pin(stc_cache *, stc_device *, uint64_t offset, uint64_t bytes);

/* -- transfers --------------------------------------------------------------------------------------------------- */

enum { STC_TO_DEVICE = 0, STC_TO_HOST = 1 };

typedef struct {
    uint64_t offset, cache_offset, bytes;
} stc_segment;

/* Maps and fills the pages that the segments touch, mapping ahead of copying, a chunk of whole pages at a time; clean
 * pages are kept as they are. The pages are promised at once (STC_NO_PAGES if there are too few). If it fails or is
 * cancelled, all is as before the call. */
STC_EXPORT int stc_load(stc_reservation *, stc_cache *, const stc_segment *, uint64_t count, uint64_t chunk_bytes,
                        stc_ticket *out);
/* Mapped pages only. Begins when `after` is over. */
STC_EXPORT int stc_copy(stc_reservation *, uint64_t offset, stc_cache *, uint64_t cache_offset, uint64_t bytes,
                        int direction, stc_ticket after, stc_ticket *out);

/* One layer's share of a block: block i lies at device_offset + i * device_stride and, on the host, at
 * host_offset + i * host_stride. Neighbours on both sides travel as one. */
typedef struct {
    uint64_t device_offset, device_stride, host_offset, host_stride, bytes;
} stc_piece;

STC_EXPORT int stc_copy_blocks(stc_reservation *, stc_cache *, const stc_piece *, uint64_t pieces,
                               const uint32_t *device_blocks, const uint32_t *host_blocks, uint64_t blocks,
                               int direction, stc_ticket after, stc_ticket *out);

STC_EXPORT int stc_ticket_poll(stc_device *, stc_ticket); /* 1 over, 0 under way, < 0 it failed */
STC_EXPORT int stc_ticket_wait(stc_device *, stc_ticket, double timeout_s);
/* Bytes that are there, from the beginning on without a gap; UINT64_MAX when the ticket is over and forgotten. */
STC_EXPORT int stc_ticket_landed(stc_device *, stc_ticket, uint64_t *bytes);
STC_EXPORT int stc_ticket_cancel(stc_device *, stc_ticket);                  /* a wish: see what became of it */
/* CUDA: a ticket for all that was put on a stream so far; a stream that waits for a ticket. */
STC_EXPORT int stc_stream_ticket(stc_device *, void *stream, stc_ticket *out);
STC_EXPORT int stc_stream_wait(stc_device *, stc_ticket, void *stream, double timeout_s);

/* -- captured allocations ---------------------------------------------------------------------------------------- */

/* Linux on x86-64 with glibc: one allocation that somebody else's shared object makes inside one of its calls gets an
 * address of our choice. What that object asks posix_memalign for and gives to free passes through here from now on;
 * the rest of the process is left alone. `object` is the path of an object that is loaded (else STC_STATE), in which no
 * other thread runs just now. Again does no harm. The object and this library are never unloaded. */
STC_EXPORT int stc_capture_install(const char *object);
/* The next allocation of this thread that asks for `least` bytes, or for more in whole granules up to `most`, and for no
 * alignment that `place` lacks, gets `place`, where the caller keeps `most` bytes. When such an object frees `place`,
 * nothing happens. */
STC_EXPORT int stc_capture_next(uint64_t least, uint64_t most, uint64_t granule, void *place);
/* How many bytes were asked for; 0: there was no such allocation. This thread captures nothing more. */
STC_EXPORT int stc_capture_taken(uint64_t *bytes);
/* Once what was allocated at `place` was freed, or never will be: later frees of this address are real ones. */
STC_EXPORT int stc_capture_forget(void *place);

#ifdef __cplusplus
}
#endif
