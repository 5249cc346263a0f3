"""Training state: saving, loading, and conversion to and from the layouts of other libraries."""
