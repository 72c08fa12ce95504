// C++ exceptions become the classes of torpor.native.errors, built with their attributes.
#include <exception>

#include "bindings.hpp"
#include "torpor/errors.hpp"

namespace nb = nanobind;

namespace torpor {

namespace {

template <typename... Arguments>
void raise(const char* name, Arguments... arguments) {
  // Looked up when one is raised: at import of this module the package is not complete yet.
  const nb::object type = nb::module_::import_("torpor.native.errors").attr(name);
  const nb::object error = type(arguments...);
  PyErr_SetObject(type.ptr(), error.ptr());
}

void translate(const std::exception_ptr& thrown, void*) {
  try {
    std::rethrow_exception(thrown);
  } catch (const OutOfDeviceMemory& error) {
    raise("OutOfDeviceMemory", error.what(), error.needed_bytes, error.free_bytes);
  } catch (const OutOfHostMemory& error) {
    raise("OutOfHostMemory", error.what(), error.needed_bytes, error.free_bytes);
  } catch (const OutOfDisk& error) {
    raise("OutOfDisk", error.what(), error.needed_bytes, error.free_bytes);
  } catch (const OutOfMemory& error) {
    raise("OutOfMemory", error.what(), error.needed_bytes, error.free_bytes);
  } catch (const ContentsCorrupt& error) {
    raise("ContentsCorrupt", error.what(), error.tag.c_str());
  } catch (const DeviceError& error) {
    raise("DeviceError", error.what(), error.call.c_str(), error.code, error.size_bytes, error.sticky);
  } catch (const CodecRefused& error) {
    raise("CodecRefused", error.what());
  } catch (const DeviceBusy& error) {
    raise("DeviceBusy", error.what());
  } catch (const Stopped& error) {
    raise("Stopped", error.what());
  } catch (const Misuse& error) {
    raise("Misuse", error.what());
  } catch (const Error& error) {
    raise("TorporError", error.what());
  }
}

}  // namespace

void bind_errors(nb::module_&) {
  nb::register_exception_translator(translate);
}

}  // namespace torpor
