/* The memory of one device as a pool of pages: the interface for other languages. Plain C, no torch, no CUDA headers.
 *
 * Every physical page of the pool is made once, when the device is opened. A model reserves addresses once and keeps
 * the addresses; pages come and go below the addresses. A page is in exactly one state: free, mapped, clean (mapped,
 * but the content can be loaded again, so the page may be given away), or limbo (to be unmapped as soon as the
 * transfers that touch the page are over).
 *
 * Handles are opaque; the caller that opens a handle closes the handle. All calls are thread safe, but no thread may
 * use a handle during the closing call or later. No call calls back. A call returns 0 or a negative code; after a
 * negative code stc_last_error() returns a sentence, for this thread, with the request, the numbers and the remedy. No
 * call aborts the process. A call that touches many pages does everything or nothing.
 * A timeout below 0 waits without limit.                                                                            */
#pragma once
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define STC_ABI 5
#define STC_EXPORT __attribute__((visibility("default")))

typedef struct stc_device stc_device;           /* pool, move list, threads that copy, map and unmap */
typedef struct stc_reservation stc_reservation; /* addresses of one owner */
typedef struct stc_cache stc_cache;             /* memory of the host in one memfd, shared by its fd */
typedef uint64_t stc_ticket;                    /* one transfer; 0 is a transfer that is over */

enum {
    STC_OK = 0,
    STC_INVALID = -1,      /* the arguments make no sense: bounds, alignment, unknown ticket */
    STC_NO_ADDRESSES = -2, /* no virtual addresses left */
    STC_NO_PAGES = -3,     /* the pool has too few free pages, and too few will become free */
    STC_STATE = -4,        /* not now: mapped already, not mapped, still in use */
    STC_DRIVER = -5,       /* the kernel or the driver refused */
    STC_UNSUPPORTED = -6,  /* this machine can't do the operation */
    STC_NO_MEMORY = -7,    /* the host or the device has less memory than asked for */
    STC_CANCELLED = -8,
    STC_TIMEOUT = -9,
    STC_DEAD = -10 /* the device's context is broken for good: open the device again in a new process */
};

/* -- device ------------------------------------------------------------------------------------------------------ */

enum { STC_BACKEND_HOST = 0, STC_BACKEND_CUDA = 1 };

typedef struct {
    uint32_t backend;
    int32_t ordinal;      /* CUDA: number of the device */
    uint64_t page_bytes;  /* 0: 2 MiB on the host; 32 MiB on CUDA: mapping costs by the page there, not by the byte */
    uint64_t pool_bytes;  /* rounded down to whole pages */
    uint32_t huge_folios; /* host: ask the kernel for 2 MiB folios; without them mapping is 100 times dearer */
    uint32_t exportable;  /* CUDA: pages can be handed to other processes */
    uint32_t helpers;     /* CUDA: bits of other devices, by ordinal: helpers' links to the host carry loads, too */
    uint32_t lazy; /* host: memory of the pool is got when a page is first mapped; 0: all memory at once */
    uint64_t relay_bytes; /* of each helper's memory, for data passing through; 0: 32 MiB */
    uint64_t pinned_most; /* CUDA: most bytes of the host that are registered (pinned) at a time; 0: no limit */
} stc_config;

typedef struct {
    uint64_t page_bytes, pages_total, pages_free, pages_mapped, pages_clean, pages_limbo;
    uint64_t pages_promised; /* promised to loads under way, not taken yet */
    uint64_t reserved_bytes; /* bytes of addresses */
    uint64_t huge_bytes;     /* bytes of the pool in 2 MiB folios */
    uint64_t map_calls, unmap_calls, unmap_failures, copy_calls;
    uint64_t to_device_bytes, to_host_bytes, zeroed_bytes;
    uint64_t pinned_bytes, pin_calls; /* bytes of the host that are registered now; calls of the driver so far */
    double map_s, unmap_s, copy_s, pin_s;
} stc_stats;

enum { STC_PAGE_FREE = 0, STC_PAGE_MAPPED = 1, STC_PAGE_CLEAN = 2, STC_PAGE_LIMBO = 3 };

#define STC_MIXED UINT32_MAX /* owner of pages of a load under way, or of a load failed in the middle */

typedef struct {
    uint32_t state;
    uint32_t owner; /* owner of the bytes in the page, even a free page; 0: no owner; STC_MIXED: several owners */
} stc_page;

STC_EXPORT int stc_abi(void);
STC_EXPORT const char *stc_last_error(void);
STC_EXPORT int stc_device_open(const stc_config *, stc_device **out);
STC_EXPORT int stc_device_close(stc_device *); /* STC_STATE while reservations or pinned ranges live */
STC_EXPORT int stc_device_stats(stc_device *, stc_stats *out);
/* Bytes of the whole device that are free, and all bytes, as the driver or the kernel counts, pools of others included. */
STC_EXPORT int stc_device_memory(stc_device *, uint64_t *free_bytes, uint64_t *total_bytes);
STC_EXPORT int stc_device_pages(stc_device *, stc_page *out, uint64_t count); /* the page map, from page 0 on */
STC_EXPORT int stc_device_settle(stc_device *, double timeout_s);             /* waits until no page is in limbo */

/* For tests and rehearsals. Throttle: bytes per second in each direction (0: full speed). Fault: the nth map, copy or
 * unmap from now on fails once (0: none). */
enum { STC_FAULT_MAP = 0, STC_FAULT_COPY = 1, STC_FAULT_UNMAP = 2 };
STC_EXPORT int stc_device_throttle(stc_device *, double bytes_per_s);
STC_EXPORT int stc_device_fault(stc_device *, int operation, uint64_t nth);

/* -- reservations ------------------------------------------------------------------------------------------------ */

typedef struct {
    uint64_t address, bytes; /* bytes rounded up to whole pages */
    uint32_t owner;          /* as in stc_page; a number is never used again */
} stc_place;

STC_EXPORT int stc_reserve(stc_device *, uint64_t bytes, stc_reservation **out, stc_place *place);
/* Unmaps the pages left and gives the addresses back. STC_STATE during a load of the reservation. */
STC_EXPORT int stc_release(stc_reservation *, double timeout_s);
/* Maps pages into an empty range. The pages hold old bytes of this owner, or zeroes, never bytes of another owner.
 * Waits for pages in limbo if too few pages are free, and for addresses of the range that are still in limbo. */
STC_EXPORT int stc_map(stc_reservation *, uint64_t offset, uint64_t bytes, double timeout_s);
/* The same on a thread of the library. The call promises the pages at once (STC_NO_PAGES if the pool has too few). If
 * mapping fails or is cancelled, the range is empty as before. The reservation can't be released meanwhile. */
STC_EXPORT int stc_map_later(stc_reservation *, uint64_t offset, uint64_t bytes, stc_ticket *out);
/* Puts pages on the move list; returns at once. The pages become free as soon as `after` and every transfer that
 * touches the pages are over. Unmapped parts of the range are passed over. */
STC_EXPORT int stc_unmap(stc_reservation *, uint64_t offset, uint64_t bytes, stc_ticket after);
/* Turns mapped pages into clean cache: stc_load takes clean pages as they are, stc_unmap frees clean pages. */
STC_EXPORT int stc_mark_clean(stc_reservation *, uint64_t offset, uint64_t bytes);
STC_EXPORT int stc_residency(stc_reservation *, uint64_t offset, uint64_t bytes, uint64_t *mapped, uint64_t *clean);
/* Host only. on = 1 puts ordinary memory of the machine below whole unmapped pages: scratch memory, for building a
 * model at the final addresses before any page is there. on = 0 takes the memory away. On scratch memory, stc_map and
 * stc_load return STC_STATE, stc_unmap does nothing, and stc_release takes the memory away. */
STC_EXPORT int stc_scratch(stc_reservation *, uint64_t offset, uint64_t bytes, int on);
/* Returns a file descriptor for another process to map the page at `offset`, and the page's offset in the file. */
STC_EXPORT int stc_export_page(stc_reservation *, uint64_t offset, int *fd, uint64_t *fd_offset);

/* -- host memory ------------------------------------------------------------------------------------------------- */

/* fd < 0 makes a new file of `bytes`; else `fd` is the file of another process, and the caller closes `fd` later. The
 * call reserves only addresses: stc_cache_commit gets memory. */
STC_EXPORT int stc_cache_open(int fd, uint64_t bytes, stc_cache **out, void **base, int *own_fd);
STC_EXPORT int stc_cache_close(stc_cache *); /* STC_STATE while transfers use the cache */
STC_EXPORT int stc_cache_commit(stc_cache *, uint64_t offset, uint64_t bytes, uint64_t *huge_bytes);
STC_EXPORT int stc_cache_discard(stc_cache *, uint64_t offset, uint64_t bytes); /* memory back to the machine */
/* Registers committed memory with the device's driver, in the background and in extents; returns at once. On CUDA a
 * transfer from or to memory that was not pinned fails, and a transfer waits until its extents are registered. Under
 * the limit `pinned_most` the least recently used extents make room for others. Every process pins for itself. */
STC_EXPORT int stc_cache_pin(stc_cache *, stc_device *, uint64_t offset, uint64_t bytes);
/* Ends the pin of the range at `offset`; waits for the transfers that were begun. Call before the range's memory is
 * discarded by any process: the driver would go on using the old memory. */
STC_EXPORT int stc_cache_unpin(stc_cache *, stc_device *, uint64_t offset);
STC_EXPORT int stc_device_pinned(stc_device *, double timeout_s); /* waits until all pins are registered, to the limit */

/* -- transfers --------------------------------------------------------------------------------------------------- */

enum { STC_TO_DEVICE = 0, STC_TO_HOST = 1 };

typedef struct {
    uint64_t offset, cache_offset, bytes;
} stc_segment;

/* Maps and fills the pages that the segments touch, mapping ahead of copying, a chunk of whole pages at a time; clean
 * pages are kept as they are. The call promises the pages at once (STC_NO_PAGES if the pool has too few). If the load
 * fails or is cancelled, everything is as before the call. */
STC_EXPORT int stc_load(stc_reservation *, stc_cache *, const stc_segment *, uint64_t count, uint64_t chunk_bytes,
                        stc_ticket *out);
/* Copies a range; all pages must be mapped. The copy begins when `after` is over. */
STC_EXPORT int stc_copy(stc_reservation *, uint64_t offset, stc_cache *, uint64_t cache_offset, uint64_t bytes,
                        int direction, stc_ticket after, stc_ticket *out);

/* A layer's share of blocks: the share of block i lies at device_offset + i * device_stride and, on the host, at
 * host_offset + i * host_stride. Neighbours on both sides are copied as one. */
typedef struct {
    uint64_t device_offset, device_stride, host_offset, host_stride, bytes;
} stc_piece;

STC_EXPORT int stc_copy_blocks(stc_reservation *, stc_cache *, const stc_piece *, uint64_t pieces,
                               const uint32_t *device_blocks, const uint32_t *host_blocks, uint64_t blocks,
                               int direction, stc_ticket after, stc_ticket *out);

STC_EXPORT int stc_ticket_poll(stc_device *, stc_ticket); /* 1: over, 0: under way, < 0: failed */
STC_EXPORT int stc_ticket_wait(stc_device *, stc_ticket, double timeout_s);
/* Bytes copied from the beginning on without a gap; UINT64_MAX if the ticket is over and forgotten. */
STC_EXPORT int stc_ticket_landed(stc_device *, stc_ticket, uint64_t *bytes);
STC_EXPORT int stc_ticket_cancel(stc_device *, stc_ticket);                  /* only a wish: poll or wait for the end */
/* CUDA: makes a ticket for all work put on a stream so far; lets later work of a stream wait for a ticket. */
STC_EXPORT int stc_stream_ticket(stc_device *, void *stream, stc_ticket *out);
STC_EXPORT int stc_stream_wait(stc_device *, stc_ticket, void *stream, double timeout_s);

/* -- captured allocations ---------------------------------------------------------------------------------------- */

/* Linux on x86-64 with glibc: give an allocation of a foreign shared object an address of the caller's choice. From now
 * on the object's calls of posix_memalign and free pass through this library; the rest of the process is left alone.
 * `object`: path of a loaded object (else STC_STATE); no other thread may run in the object during the call. A second
 * call does nothing. The object and this library are never unloaded. */
STC_EXPORT int stc_capture_install(const char *object);
/* Gives `place` to the thread's next allocation of `least` bytes, or of more in whole granules up to `most`, with no
 * alignment that `place` lacks. The caller keeps `most` bytes at `place`. If an installed object frees `place`, nothing
 * happens. */
STC_EXPORT int stc_capture_next(uint64_t least, uint64_t most, uint64_t granule, void *place);
/* Returns the size of the captured allocation; 0: no allocation was captured. The thread captures nothing more. */
STC_EXPORT int stc_capture_taken(uint64_t *bytes);
/* Makes later frees of `place` real. Call once the allocation at `place` was freed, or never will be. */
STC_EXPORT int stc_capture_forget(void *place);

#ifdef __cplusplus
}
#endif
