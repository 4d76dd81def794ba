// The host cache: memory of the host in a file shared by a node's processes, for images of models and KV blocks of
// parked requests.
#pragma once
#include "device.h"

namespace staccato {

class Cache {
  public:
    Cache(int fd, uint64_t bytes);  // fd < 0: a new file
    ~Cache();

    const uint64_t bytes;
    const int fd;
    char* const base;

    char* range(uint64_t offset, uint64_t bytes) const;  // throws if the range lies outside
    uint64_t commit(uint64_t offset, uint64_t bytes);    // returns bytes in 2 MiB folios
    void discard(uint64_t offset, uint64_t bytes);
    void pin(Device&, uint64_t offset, uint64_t bytes);
    void unpin(Device&, uint64_t offset);  // the range pinned at `offset`
    void use(const TicketPtr&);  // notes a transfer that reads or writes the cache
    void close();                // throws while transfers use the cache; then call only the destructor

  private:
    void drop_finished_users();

    struct Pin {
        Device* device;
        char* base;
    };
    std::mutex mu_;  // may be locked under a device's lock
    std::vector<Pin> pins_;
    std::vector<TicketPtr> users_;
};

}  // namespace staccato
