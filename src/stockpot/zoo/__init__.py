"""Makes pools: one pre-trained model, fine-tuned many times with different hyperparameters; and the demo's pool."""
