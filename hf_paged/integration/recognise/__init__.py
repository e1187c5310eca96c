"""Recognition of calls of `model.generate` that the engine carries out exactly as stock would."""
