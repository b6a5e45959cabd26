// The LLVM code generator lives in this folder; no LLVM header is included anywhere else.
