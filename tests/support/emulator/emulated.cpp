// Calls functions of a library for whoever writes to its standard input: emulated.py has the other side.
//
// A call: its name, the number of its arguments, and of each argument the bytes of a struct and the pointers in it: at
// which byte of it, and how many bytes it points to, which follow. No bytes and one pointer: the argument is the pointer.
// The answer: what the function returned, and all that its pointers point to. Sizes and numbers have 8 bytes. Nothing can
// be read or written beyond the end of what was sent: the page after it does not exist.

#include <dlfcn.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

namespace {

void read_all(void* to, size_t bytes) {
  if (bytes > 0 && fread(to, 1, bytes, stdin) != bytes) exit(0);
}

uint64_t number() {
  uint64_t value;
  read_all(&value, sizeof value);
  return value;
}

std::string text() {
  std::string found(number(), '\0');
  read_all(found.data(), found.size());
  return found;
}

void answer(const void* from, size_t bytes) { fwrite(from, 1, bytes, stdout); }

// Memory that ends where a page does, before one that cannot be touched.
struct Memory {
  char *start, *data;
  size_t mapped, bytes;

  explicit Memory(size_t bytes) : bytes(bytes) {
    const size_t page = sysconf(_SC_PAGESIZE), pages = (bytes + page - 1) / page;
    mapped = (pages + 1) * page;
    start = static_cast<char*>(mmap(nullptr, mapped, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
    mprotect(start + pages * page, page, PROT_NONE);
    data = start + pages * page - bytes;
  }
};

}  // namespace

int main(int, char** words) {
  void* library = dlopen(words[1], RTLD_NOW);
  if (library == nullptr) {
    fprintf(stderr, "%s\n", dlerror());
    return 1;
  }
  for (;;) {
    const std::string name = text();
    void* function = dlsym(library, name.c_str());
    if (function == nullptr) return 1;
    if (name == "instructions") {
      const std::string said = reinterpret_cast<const char* (*)()>(function)();
      const uint64_t bytes = said.size();
      answer(&bytes, sizeof bytes), answer(said.data(), bytes);
      fflush(stdout);
      continue;
    }
    void* arguments[4] = {};
    std::vector<Memory> held, structs;
    const uint64_t count = number();
    for (uint64_t i = 0; i < count; ++i) {
      structs.emplace_back(number());
      char* of = structs.back().data;
      read_all(of, structs.back().bytes);
      arguments[i] = of;
      for (uint64_t pointers = number(); pointers > 0; --pointers) {
        const uint64_t at = number();
        held.emplace_back(number());
        read_all(held.back().data, held.back().bytes);
        if (structs.back().bytes == 0)
          arguments[i] = held.back().data;
        else
          memcpy(of + at, &held.back().data, sizeof(void*));
      }
    }
    const int64_t returned = reinterpret_cast<int32_t (*)(void*, void*, void*, void*)>(function)(
        arguments[0], arguments[1], arguments[2], arguments[3]);
    answer(&returned, sizeof returned);
    for (const Memory& each : held) answer(each.data, each.bytes);
    fflush(stdout);
    for (const Memory& each : held) munmap(each.start, each.mapped);
    for (const Memory& each : structs) munmap(each.start, each.mapped);
  }
}
