"""The same run on another layout: record what happens in each step, and find the first difference."""
