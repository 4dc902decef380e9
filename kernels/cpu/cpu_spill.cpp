// An allocator for torch's tensors on the CPU that maps large ones from files without a name, in a folder on disk.
//
// Such memory is page cache: where it gets short, the kernel writes pages to the files and reads them again. A file is
// gone as soon as its tensor is, or the process.

#include <c10/core/CPUAllocator.h>
#include <c10/util/Exception.h>
#include <fcntl.h>
#include <linux/magic.h>
#include <sys/mman.h>
#include <sys/vfs.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <map>
#include <mutex>
#include <string>
#include <utility>

namespace {

constexpr size_t PAGE = 4096, MOST_IDLE = size_t{256} << 20;

struct Spill final : c10::Allocator {
  std::mutex lock;
  std::map<void*, size_t> mapped;
  std::deque<std::pair<size_t, void*>> idle;  // of freed tensors, oldest first: touching new pages takes long
  size_t idle_bytes = 0;
  std::string folder;
  size_t least = 0, most_idle = 0, now = 0, peak = 0;
  c10::Allocator* usual = nullptr;  // before the first start

  c10::DataPtr allocate(size_t bytes) override {
    if (bytes < least) return usual->allocate(bytes);
    void* place = map(bytes);
    return {place, place, &free_any, c10::Device(c10::DeviceType::CPU)};
  }

  c10::DeleterFnPtr raw_deleter() const override { return &free_any; }

  void copy_data(void* to, const void* from, std::size_t bytes) const override { default_copy_data(to, from, bytes); }

  void* map(size_t bytes) {
    const size_t whole = (bytes + PAGE - 1) / PAGE * PAGE;
    void* place = reused(whole);
    if (place == nullptr) place = created(whole);
    std::lock_guard<std::mutex> held(lock);
    mapped[place] = whole;
    now += whole;
    peak = std::max(peak, now);
    return place;
  }

  void* reused(size_t whole) {
    std::lock_guard<std::mutex> held(lock);
    const auto same = [whole](const auto& each) { return each.first == whole; };
    const auto found = std::find_if(idle.begin(), idle.end(), same);
    if (found == idle.end()) return nullptr;
    void* place = found->second;
    idle.erase(found);
    idle_bytes -= whole;
    return place;
  }

  void* created(size_t whole) {
    void* place = nullptr;
    int why = of_new_file(whole, place);
    if (why == ENOSPC) {
      shrink_idle(0);
      why = of_new_file(whole, place);
    }
    TORCH_CHECK_WITH(OutOfMemoryError, why == 0, "cannot spill ", whole, " bytes to ", folder, ": ", std::strerror(why));
    return place;
  }

  // 0, or the number of the error.
  int of_new_file(size_t whole, void*& place) {
    const int file = nameless();
    if (file < 0) return errno;
    // Reserved now: a page that has no place on the disk when it is written would end the process.
    int why = posix_fallocate(file, 0, static_cast<off_t>(whole));
    if (why == 0) {
      place = mmap(nullptr, whole, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
      why = place == MAP_FAILED ? errno : 0;
    }
    close(file);
    return why;
  }

  int nameless() {
    int file = open(folder.c_str(), O_TMPFILE | O_RDWR | O_CLOEXEC, 0600);
    if (file >= 0 || (errno != EOPNOTSUPP && errno != EISDIR && errno != EINVAL)) return file;
    std::string name = folder + "/.compress-spill-XXXXXX";  // a file system that has only named files
    file = mkostemp(name.data(), O_CLOEXEC);
    if (file >= 0) unlink(name.c_str());
    return file;
  }

  void shrink_idle(size_t most) {
    std::lock_guard<std::mutex> held(lock);
    while (idle_bytes > most) {
      idle_bytes -= idle.front().first;
      munmap(idle.front().second, idle.front().first);
      idle.pop_front();
    }
  }

  bool freed(void* place);
  static void free_any(void* place);
};

Spill spill;

// True for a tensor of ours.
bool Spill::freed(void* place) {
  {
    std::lock_guard<std::mutex> held(lock);
    const auto found = mapped.find(place);
    if (found == mapped.end()) return false;
    idle.emplace_back(found->second, place);
    idle_bytes += found->second;
    now -= found->second;
    mapped.erase(found);
  }
  shrink_idle(most_idle);
  return true;
}

void Spill::free_any(void* place) {
  if (!spill.freed(place)) spill.usual->raw_deleter()(place);
}

}  // namespace

extern "C" {

// Tensors of at least so many bytes are mapped from files in the folder, until `spill_stop`. Returns 0, -1 for a folder
// whose files lie in memory, or the number of the error that a first file meets.
int32_t spill_start(const char* folder, int64_t least) {
  struct statfs found;
  if (statfs(folder, &found) != 0) return errno;
  if (found.f_type == TMPFS_MAGIC || found.f_type == RAMFS_MAGIC) return -1;
  spill.folder = folder;
  void* place = nullptr;
  if (const int why = spill.of_new_file(PAGE, place)) return why;
  munmap(place, PAGE);
  if (spill.usual == nullptr) spill.usual = c10::GetCPUAllocator();
  spill.least = static_cast<size_t>(least);
  spill.most_idle = MOST_IDLE;
  spill.peak = spill.now;
  c10::SetCPUAllocator(&spill);
  return 0;
}

// Tensors that are there stay, and leave nothing behind when they go.
void spill_stop() {
  c10::SetCPUAllocator(spill.usual);
  spill.most_idle = 0;
  spill.shrink_idle(0);
}

int64_t spill_now() { return static_cast<int64_t>(spill.now); }
int64_t spill_peak() { return static_cast<int64_t>(spill.peak); }
}
