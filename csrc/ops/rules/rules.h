#pragma once
// Every rule that the rows of aten_*.def name.
#include "ops/rules/index.h"
#include "ops/rules/make.h"
#include "ops/rules/nn.h"
#include "ops/rules/pointwise.h"
#include "ops/rules/reduction.h"
#include "ops/rules/view.h"
