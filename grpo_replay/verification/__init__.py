"""An independent recomputation of a run from its files: shares no code with what made them, but
for the recipe and the file readers. Imports storage and what is below; no torch."""
