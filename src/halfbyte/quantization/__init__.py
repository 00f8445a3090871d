"""The job: plan what a quantized checkpoint holds, then stream it from the source, resumably."""
