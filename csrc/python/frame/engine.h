#pragma once

namespace kiln::frame {

/// Has Python's autograd engine make its threads, once, before a trace differentiates by the base engine. PyTorch makes
/// threads for the first engine that runs in a process only, and backwards that nest too deep for one stack would find
/// Python's engine without. Needs the GIL, and lets it go for a moment.
void start_engine();

}  // namespace kiln::frame
