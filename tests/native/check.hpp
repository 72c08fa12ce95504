// A test in few lines: CASE("a sentence") { CHECK(x == y); CHECK_THROWS(Misuse, f()); }
// Sources share one program (main.cpp). Its first argument names the source whose cases it runs, "" all; a
// second one runs only the cases whose names contain it.
#pragma once

#include <cstdio>
#include <cstring>
#include <exception>
#include <functional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace check {

struct Case {
  std::string name;
  std::function<void()> body;
  std::string file{};  // as the compiler was given it
};

inline std::vector<Case>& cases() {
  static std::vector<Case> all;
  return all;
}

struct Register {
  Register(std::string name, std::function<void()> body, const char* file = "") {
    cases().push_back({.name = std::move(name), .body = std::move(body), .file = file});
  }
};

[[noreturn]] inline void fail(const char* file, int line, const std::string& what) {
  throw std::runtime_error(std::string(file) + ":" + std::to_string(line) + ": " + what);
}

// 0 when at least one case ran and none failed.
inline int run(const std::string& file, const std::string& name) {
  int failed = 0;
  int passed = 0;
  for (const Case& one : cases()) {
    if (!file.empty() && !one.file.ends_with("/" + file + ".cpp")) continue;
    if (one.name.find(name) == std::string::npos) continue;
    try {
      one.body();
      ++passed;
    } catch (const std::exception& error) {
      ++failed;
      std::printf("FAILED %s\n  %s\n", one.name.c_str(), error.what());
    }
  }
  std::printf("%d passed, %d failed\n", passed, failed);
  return failed == 0 && passed > 0 ? 0 : 1;
}

}  // namespace check

#define CHECK_CONCAT2(a, b) a##b
#define CHECK_CONCAT(a, b) CHECK_CONCAT2(a, b)
#define CASE(name)                                                                                    \
  static void CHECK_CONCAT(case_, __LINE__)();                                                        \
  static const check::Register CHECK_CONCAT(register_, __LINE__)(name, CHECK_CONCAT(case_, __LINE__), \
                                                                 __FILE__);                           \
  static void CHECK_CONCAT(case_, __LINE__)()
#define CHECK(...)                                                                  \
  do {                                                                              \
    if (!(__VA_ARGS__)) check::fail(__FILE__, __LINE__, "not true: " #__VA_ARGS__); \
  } while (false)
#define CHECK_THROWS(type, ...)                                                             \
  do {                                                                                      \
    bool thrown = false;                                                                    \
    try {                                                                                   \
      (void)(__VA_ARGS__);                                                                  \
    } catch (const type&) {                                                                 \
      thrown = true;                                                                        \
    }                                                                                       \
    if (!thrown) check::fail(__FILE__, __LINE__, "did not throw " #type ": " #__VA_ARGS__); \
  } while (false)
