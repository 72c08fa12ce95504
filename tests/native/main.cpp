// The program of all tests: native_tests [source [part of a case's name]].
#include "check.hpp"

int main(int argc, char** argv) {
  return check::run(argc > 1 ? argv[1] : "", argc > 2 ? argv[2] : "");
}
