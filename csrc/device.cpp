#include "device.h"

#include <algorithm>

#include "reservation.h"

namespace staccato {

namespace {

constexpr auto EVENT_POLL = std::chrono::microseconds(100);
constexpr auto UNMAP_RETRY = std::chrono::milliseconds(10);

double since(Clock::time_point start) { return std::chrono::duration<double>(Clock::now() - start).count(); }

bool all(const std::vector<TicketPtr>& tickets, bool (Ticket::*is)() const) {
    return std::all_of(tickets.begin(), tickets.end(), [&](const TicketPtr& ticket) { return (ticket.get()->*is)(); });
}

bool none(const std::vector<TicketPtr>& tickets, bool (Ticket::*is)() const) {
    return std::none_of(tickets.begin(), tickets.end(), [&](const TicketPtr& ticket) { return (ticket.get()->*is)(); });
}

std::unique_ptr<Backend> open_backend(const stc_config& config) {
    if (config.backend == STC_BACKEND_HOST) {
        if (config.helpers) fail(STC_UNSUPPORTED, "helpers are other CUDA devices: the host backend has none");
        return open_host(config);
    }
    if (config.backend == STC_BACKEND_CUDA) return open_cuda(config);
    fail(STC_INVALID, "there is no backend ", config.backend, ": 0 is the host, 1 is CUDA");
}

}  // namespace

// -- threads ----------------------------------------------------------------------------------------------------------

void Worker::post(std::function<void()> job) {
    std::lock_guard<std::mutex> lock(mu_);
    jobs_.push_back(std::move(job));
    changed_.notify_one();
}

void Worker::run() {
    Lock lock(mu_);
    for (;;) {
        changed_.wait(lock, [this] { return stopping_ || !jobs_.empty(); });
        if (jobs_.empty()) return;
        auto job = std::move(jobs_.front());
        jobs_.pop_front();
        lock.unlock();
        job();
        job = nullptr;  // objects held by the job go before the thread sleeps
        lock.lock();
    }
}

Worker::~Worker() {
    {
        std::lock_guard<std::mutex> lock(mu_);
        stopping_ = true;
        changed_.notify_one();
    }
    thread_.join();
}

// -- life -------------------------------------------------------------------------------------------------------------

Device::Device(const stc_config& config)
    : backend(open_backend(config)),
      pool(backend->pages),
      pins_(*backend, config.pinned_most, [this](Lane lane) { drain(lane); }) {
    reaper_ = std::thread([this] { reap(); });
}

void Device::close() {
    Lock lock(mu);
    if (users > 0) {
        fail(STC_STATE, "the device has ", users,
             " reservations or pinned ranges: release them and close their caches first");
    }
    stopping_ = true;
    announce();
}

Device::~Device() { reaper_.join(); }

stc_stats Device::stats() {
    std::lock_guard<std::mutex> lock(mu);
    stc_stats stats = counted;
    stats.page_bytes = backend->page_bytes;
    stats.huge_bytes = backend->huge_bytes;
    stats.pages_total = pool.size();
    stats.pages_free = pool.count(FREE);
    stats.pages_mapped = pool.count(MAPPED);
    stats.pages_clean = pool.count(CLEAN);
    stats.pages_limbo = pool.count(LIMBO);
    stats.pages_promised = promised;
    pins_.add_to(stats);
    return stats;
}

// -- waiting ----------------------------------------------------------------------------------------------------------

void Device::announce() {
    changes_++;
    changed_.notify_all();
}

uint64_t Device::coming() const {
    uint64_t pages = 0;
    for (const Leaving& entry : move_list) pages += entry.hopeless() ? 0 : entry.pages.size();
    return pages;
}

std::string Device::shortage(uint64_t pages_wanted) const {
    return text(pages_wanted, " pages of ", mebibytes(backend->page_bytes), " MiB are wanted, ", pool.count(FREE),
                " of ", pool.size(), " are free, ", pool.count(LIMBO), " in limbo, ", promised,
                " promised to loads: evict clean pages (", pool.count(CLEAN), ") or wait for others to leave");
}

// -- tickets ----------------------------------------------------------------------------------------------------------

TicketPtr Device::new_ticket(uint64_t bytes) {
    auto ticket = std::make_shared<Ticket>(next_ticket_++, bytes);
    tickets_[ticket->id] = ticket;
    return ticket;
}

TicketPtr Device::find_ticket(uint64_t id) {
    if (id >= next_ticket_) fail(STC_INVALID, "ticket ", id, " was never given out");
    auto found = tickets_.find(id);
    return found == tickets_.end() ? nullptr : found->second;
}

void Device::await_submission(Ticket& ticket, const Deadline& deadline) {
    Lock lock(mu);
    if (!await(lock, deadline, [&] { return !ticket.pending(); })) {
        fail(STC_TIMEOUT, "transfer ", ticket.id, " of ", mebibytes(ticket.bytes), " MiB is still under way after ",
             deadline.timeout_s, " s: wait longer or cancel it");
    }
}

void Device::await_ticket(Ticket& ticket, const Deadline& deadline) {
    await_submission(ticket, deadline);
    if (deadline.forever) return ticket.event().wait();
    while (!ticket.finished()) {
        if (deadline.passed()) {
            fail(STC_TIMEOUT, "transfer ", ticket.id, " of ", mebibytes(ticket.bytes), " MiB is still under way after ",
                 deadline.timeout_s, " s: wait longer");
        }
        std::this_thread::sleep_for(EVENT_POLL / 2);
    }
}

// -- the move list ----------------------------------------------------------------------------------------------------
//
//   unmap ──▶ entry {addresses, pages in limbo, tickets} ──reap, when all tickets are over──▶ unmapped, pages free
//
// Until then no call maps pages at the entry's addresses, and no owner gets the entry's pages: a transfer still under
// way reads and writes the right pages, and a late unmap cannot hit a newer mapping.

void Device::leave(Reservation& reservation, uint64_t first, std::vector<uint32_t> pages,
                   std::vector<TicketPtr> after) {
    if (pages.empty()) return;
    for (uint32_t page : pages) pool.set(page, LIMBO);
    move_list.push_back({&reservation, first, std::move(pages), std::move(after)});
    announce();
}

void Device::reap() {
    Lock lock(mu);
    while (!stopping_) {
        const uint64_t seen = changes_;
        auto tickets = tickets_to_check();
        std::vector<std::list<Leaving>::iterator> entries;
        for (auto entry = move_list.begin(); entry != move_list.end(); ++entry) entries.push_back(entry);
        lock.unlock();  // asking a device about an event may take long

        const auto unfinished = [](const TicketPtr& ticket) { return !ticket->succeeded(); };
        tickets.erase(std::remove_if(tickets.begin(), tickets.end(), unfinished), tickets.end());
        std::vector<std::list<Leaving>::iterator> gone;
        bool failed = false, submitted = false;
        for (auto entry : entries) {
            if (!all(entry->after, &Ticket::over)) {
                submitted |= none(entry->after, &Ticket::pending);
            } else if (Clock::now() >= entry->not_before && take_away(*entry)) {
                gone.push_back(entry);
            } else {
                failed = true;
            }
        }

        lock.lock();
        forget(tickets);
        for (auto entry : gone) {
            for (uint32_t page : entry->pages) pool.set(page, FREE);
            move_list.erase(entry);
        }
        if (!gone.empty()) {
            announce();
            continue;
        }
        auto news = [&] { return changes_ != seen; };
        if (submitted) {
            changed_.wait_for(lock, EVENT_POLL, news);
        } else if (failed) {
            changed_.wait_for(lock, UNMAP_RETRY, news);
        } else {
            changed_.wait(lock, news);
        }
    }
}

// Tickets to forget if succeeded. Failed tickets stay known: a caller who asks late must hear of the failure.
std::vector<TicketPtr> Device::tickets_to_check() {
    std::vector<TicketPtr> tickets;
    if (tickets_.size() < check_tickets_at_) return tickets;
    for (auto& known : tickets_) tickets.push_back(known.second);
    return tickets;
}

void Device::forget(const std::vector<TicketPtr>& finished) {
    for (const TicketPtr& ticket : finished) tickets_.erase(ticket->id);
    check_tickets_at_ = std::max<uint64_t>(256, 2 * tickets_.size());
}

bool Device::take_away(Leaving& entry) {
    try {
        unmap(entry.reservation->address_of(entry.first), entry.pages.size() * backend->page_bytes);
        return true;
    } catch (const Error&) {  // the pages stay in limbo, as counters show; waiting calls are told
        std::lock_guard<std::mutex> lock(mu);
        counted.unmap_failures++;
        entry.not_before = Clock::now() + UNMAP_RETRY;
        if (++entry.failures == 3) announce();
        return false;
    }
}

void Device::settle(const Deadline& deadline) {
    Lock lock(mu);
    if (!await(lock, deadline, [&] { return move_list.empty(); })) {
        fail(STC_TIMEOUT, pool.count(LIMBO), " pages are still in limbo after ", deadline.timeout_s, " s, ",
             counted.unmap_failures, " unmaps failed");
    }
}

// -- operations on the backend ----------------------------------------------------------------------------------------

void Device::map(uint64_t address, uint32_t first_page, uint64_t count) {
    fault(MAP);
    const auto start = Clock::now();
    backend->map(address, first_page, count);
    std::lock_guard<std::mutex> lock(mu);
    counted.map_calls++;
    counted.map_s += since(start);
}

void Device::allow(uint64_t address, uint64_t bytes) {
    const auto start = Clock::now();
    backend->allow(address, bytes);
    std::lock_guard<std::mutex> lock(mu);
    counted.map_s += since(start);
}

void Device::unmap(uint64_t address, uint64_t bytes) {
    fault(UNMAP);
    const auto start = Clock::now();
    backend->unmap(address, bytes);
    std::lock_guard<std::mutex> lock(mu);
    counted.unmap_calls++;
    counted.unmap_s += since(start);
}

void Device::copy(Lane lane, const Copy& copy, Direction direction) {
    fault(COPY);
    const auto start = Clock::now();
    const auto issue = [&](const Copy& part) { backend->copy(lane, part, direction); };
    backend->copies_pinned_alone ? pins_.each(copy, lane, issue) : issue(copy);
    pace(direction, copy.bytes());
    std::lock_guard<std::mutex> lock(mu);
    counted.copy_calls++;
    counted.copy_s += since(start);
    (direction == TO_DEVICE ? counted.to_device_bytes : counted.to_host_bytes) += copy.bytes();
}

void Device::zero(Lane lane, uint64_t address, uint64_t bytes) {
    backend->zero(lane, address, bytes);
    std::lock_guard<std::mutex> lock(mu);
    counted.zeroed_bytes += bytes;
}

void Device::drain(Lane lane) noexcept {
    try {
        backend->record(lane)->wait();
    } catch (const std::exception&) {  // the device is gone: nothing is in flight
    }
}

// -- pins -------------------------------------------------------------------------------------------------------------

void Device::pin(char* base, uint64_t bytes) {
    pins_.announce(base, bytes);
    {
        std::lock_guard<std::mutex> lock(mu);
        users++;
    }
    pinner.post([this, base] {
        pins_.fill(base);
        std::lock_guard<std::mutex> lock(mu);
        announce();
    });
}

void Device::unpin(char* base) {
    pins_.withdraw(base);
    std::lock_guard<std::mutex> lock(mu);
    users--;
}

void Device::await_pins(const Deadline& deadline) {
    Lock lock(mu);
    if (!await(lock, deadline, [&] { return pins_.idle(); })) {
        fail(STC_TIMEOUT, "memory of the host is still being pinned after ", deadline.timeout_s, " s: wait longer");
    }
}

// -- for tests --------------------------------------------------------------------------------------------------------

void Device::inject(int operation, uint64_t nth) {
    if (operation < 0 || operation >= OPERATIONS) fail(STC_INVALID, "there is no operation ", operation, " to fail");
    faults_[operation] = nth;
}

void Device::fault(Operation operation) {
    static const char* names[] = {"map", "copy", "unmap"};
    uint64_t left = faults_[operation].load(std::memory_order_relaxed);
    while (left > 0 && !faults_[operation].compare_exchange_weak(left, left - 1)) {
    }
    if (left == 1) fail(STC_DRIVER, "this ", names[operation], " was made to fail by the fault injector");
}

void Device::throttle(double bytes_per_s) {
    if (!(bytes_per_s >= 0)) fail(STC_INVALID, "a link of ", bytes_per_s, " bytes per second can't be");
    std::lock_guard<std::mutex> lock(pace_mu_);
    bytes_per_s_ = bytes_per_s;
}

// Paces copies like PCIe: all lanes of a direction share a link.
void Device::pace(Direction direction, uint64_t bytes) {
    Clock::time_point until;
    {
        std::lock_guard<std::mutex> lock(pace_mu_);
        if (bytes_per_s_ == 0) return;
        auto& free_at = link_free_at_[direction];
        const std::chrono::duration<double> busy(static_cast<double>(bytes) / bytes_per_s_);
        free_at = std::max(free_at, Clock::now()) + std::chrono::duration_cast<Clock::duration>(busy);
        until = free_at;
    }
    std::this_thread::sleep_until(until);
}

}  // namespace staccato
