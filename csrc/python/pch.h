#pragma once
// PyTorch's Python-facing headers, precompiled.
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/extension.h>

#include "aten/pch.h"
