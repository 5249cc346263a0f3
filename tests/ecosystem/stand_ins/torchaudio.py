"""A stand-in for torchaudio, which LLaMA-Factory imports though it reads no audio here: its wheel needs the same build of torch."""
