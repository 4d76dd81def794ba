// Memory of the host in one file that the processes of a node share: images of models, KV cache of parked requests.
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

    char* range(uint64_t offset, uint64_t bytes) const;  // throws if it lies outside
    uint64_t commit(uint64_t offset, uint64_t bytes);    // returns bytes in 2 MiB folios
    void discard(uint64_t offset, uint64_t bytes);
    void pin(Device&, uint64_t offset, uint64_t bytes);
    void use(const TicketPtr&);  // a transfer that reads or writes it
    void close();                // throws while transfers use it; afterwards only the destructor may be called

  private:
    void drop_finished_users();

    struct Pin {
        Device* device;
        char* base;
    };
    std::mutex mu_;  // may be taken under a device's
    std::vector<Pin> pins_;
    std::vector<TicketPtr> users_;
};

}  // namespace staccato
