#pragma once
#include "python/pch.h"

namespace kiln::bindings {

using Init = void (*)(pybind11::module_& m);
/// Adds a topic's init function to those that the module runs when it is imported.
bool add_bindings(Init init);

}  // namespace kiln::bindings

/// Opens the init function of one topic: KILN_BINDINGS(options) { m.def(...); }
#define KILN_BINDINGS(topic)                                                                        \
  static void init_##topic(pybind11::module_& m);                                                   \
  [[maybe_unused]] static const bool added_##topic = ::kiln::bindings::add_bindings(&init_##topic); \
  static void init_##topic([[maybe_unused]] pybind11::module_& m)
