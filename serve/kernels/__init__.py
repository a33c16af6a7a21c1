"""CPU kernels in C++: a whole step of the decoder in one call, with weights of 4 or 8 bits."""
