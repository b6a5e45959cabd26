#include "python/pch.h"

PYBIND11_MODULE(_C, m) { m.doc() = "kiln's C++ core."; }
