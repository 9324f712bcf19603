"""Text becomes ids, ids become batches."""
