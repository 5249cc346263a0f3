"""The state of a training: saved, loaded, and brought to and from the layouts of other libraries."""
