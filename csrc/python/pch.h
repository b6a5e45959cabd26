#pragma once
// PyTorch's Python-facing headers, precompiled. Not torch/extension.h: the C++ nn library in it is instantiated again
// in every file, 15 s each.
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

#include "aten/pch.h"
