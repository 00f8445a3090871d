"""GPU kernels side by side in one run: halfbyte's, torch's and, where they can be imported, others'."""
