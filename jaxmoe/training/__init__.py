"""Training of the decoder language model: data, steps, checkpoints, the loop and sampling."""
