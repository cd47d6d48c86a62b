"""Machine code compiled while the program runs: LLVM through llvmlite, and loops over vectors."""
