"""What a model will take on a GPU, before anything is quantized."""
