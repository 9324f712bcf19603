"""What registered blocks share; nobody registers anything here."""
