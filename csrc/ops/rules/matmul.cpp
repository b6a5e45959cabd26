#include "ops/rules/nn.h"
#include "ops/rules/view.h"

namespace kiln::ops::rules {
namespace {

std::string by(const TensorMeta& t) { return std::to_string(t.sizes[0]) + "x" + std::to_string(t.sizes[1]); }

// As c10::ScalarType prints in these messages.
std::string cpp_name(DType t) {
  switch (t) {
    case DType::Float32:
      return "float";
    case DType::Float64:
      return "double";
    case DType::Int64:
      return "long int";
    case DType::Int32:
      return "int";
    case DType::BFloat16:
      return "c10::BFloat16";
    case DType::Float16:
      return "c10::Half";
    case DType::Bool:
      return "bool";
    default:
      return dtype_label(t);
  }
}

void same_dtype(const TensorMeta& a, const TensorMeta& b) {
  if (a.dtype != b.dtype)
    shape_error("expected m1 and m2 to have the same dtype, but got: " + cpp_name(a.dtype) +
                " != " + cpp_name(b.dtype));
}

TensorMeta product_2d(const TensorMeta& a, const TensorMeta& b) {
  if (a.sizes[1] != b.sizes[0])
    shape_error("mat1 and mat2 shapes cannot be multiplied (" + by(a) + " and " + by(b) + ")");
  same_dtype(a, b);
  return contiguous(a, {a.sizes[0], b.sizes[1]});
}

TensorMeta product_3d(const TensorMeta& a, const TensorMeta& b) {
  if (a.dim() != 3) shape_error("batch1 must be a 3D tensor");
  if (b.dim() != 3) shape_error("batch2 must be a 3D tensor");
  if (a.sizes[0] != b.sizes[0] || a.sizes[2] != b.sizes[1])
    shape_error("Expected size for first two dimensions of batch2 tensor to be: [" + std::to_string(a.sizes[0]) + ", " +
                std::to_string(a.sizes[2]) + "] but got: [" + std::to_string(b.sizes[0]) + ", " +
                std::to_string(b.sizes[1]) + "].");
  if (a.dtype != b.dtype)
    shape_error("expected scalar type " + dtype_label(a.dtype) + " but found " + dtype_label(b.dtype));
  return contiguous(a, {a.sizes[0], a.sizes[1], b.sizes[2]});
}

}  // namespace

Metas mm(const OpInfo&, Args args) {
  const TensorMeta &a = tensor(args, 0), &b = tensor(args, 1);
  if (a.dim() != 2) shape_error("self must be a matrix");
  if (b.dim() != 2) shape_error("mat2 must be a matrix");
  return one(product_2d(a, b));
}

Metas addmm(const OpInfo&, Args args) {
  const TensorMeta &self = tensor(args, 0), &a = tensor(args, 1), &b = tensor(args, 2);
  if (a.dim() != 2) shape_error("mat1 must be a matrix, got " + std::to_string(a.dim()) + "-D tensor");
  if (b.dim() != 2) shape_error("mat2 must be a matrix, got " + std::to_string(b.dim()) + "-D tensor");
  const TensorMeta out = product_2d(a, b);
  if (self.dtype != a.dtype)
    shape_error("self and mat2 must have the same dtype, but got " + dtype_label(self.dtype) + " and " +
                dtype_label(b.dtype));
  expand_to(self, out.sizes);
  return one(out);
}

Metas bmm(const OpInfo&, Args args) { return one(product_3d(tensor(args, 0), tensor(args, 1))); }

Metas baddbmm(const OpInfo&, Args args) {
  const TensorMeta out = product_3d(tensor(args, 1), tensor(args, 2));
  expand_to(tensor(args, 0), out.sizes);
  return one(out);
}

Metas addbmm(const OpInfo&, Args args) {
  const TensorMeta out = product_3d(tensor(args, 1), tensor(args, 2));
  const Ints sizes{out.sizes[1], out.sizes[2]};
  expand_to(tensor(args, 0), sizes);
  return one(contiguous(out, sizes));
}

Metas mv(const OpInfo&, Args args) {
  const TensorMeta &a = tensor(args, 0), &v = tensor(args, 1);
  if (a.dim() != 2 || v.dim() != 1)
    shape_error("vector + matrix @ vector expected, got 1, " + std::to_string(a.dim()) + ", " +
                std::to_string(v.dim()));
  if (a.sizes[1] != v.sizes[0])
    shape_error("size mismatch, got input (" + std::to_string(a.sizes[0]) + "), mat (" + by(a) + "), vec (" +
                std::to_string(v.sizes[0]) + ")");
  return one(contiguous(a, {a.sizes[0]}));
}

Metas addmv(const OpInfo& info, Args args) { return mv(info, args.subspan(1)); }

Metas dot(const OpInfo&, Args args) {
  const TensorMeta &a = tensor(args, 0), &b = tensor(args, 1);
  if (a.dim() != 1 || b.dim() != 1)
    shape_error("1D tensors expected, but got " + std::to_string(a.dim()) + "D and " + std::to_string(b.dim()) +
                "D tensors");
  if (a.dtype != b.dtype)
    shape_error("dot : expected both vectors to have same dtype, but found " + dtype_label(a.dtype) + " and " +
                dtype_label(b.dtype));
  if (a.sizes != b.sizes)
    shape_error("inconsistent tensor size, expected tensor " + sizes_text(a.sizes) + " and src " + sizes_text(b.sizes) +
                " to have the same number of elements, but got " + std::to_string(a.numel()) + " and " +
                std::to_string(b.numel()) + " elements respectively");
  return one(contiguous(a, {}));
}

Metas addr(const OpInfo&, Args args) {
  const TensorMeta &self = tensor(args, 0), &a = tensor(args, 1), &b = tensor(args, 2);
  if (a.dim() != 1 || b.dim() != 1) shape_error("addr: Expected 1-D argument vec1 and vec2");
  const Ints sizes{a.sizes[0], b.sizes[0]};
  expand_to(self, sizes);
  const Arg operands[] = {args[0], args[1], args[2]};
  const DType common = result_type(operands);
  const TensorMeta wide = expand_to(self, sizes);
  const TensorMeta column = strided(a, {a.sizes[0], 1}, {a.strides[0], 1});
  const TensorMeta* inputs[] = {&wide, &column, &b};
  return one(iterate(inputs, common, &common));
}

}  // namespace kiln::ops::rules
