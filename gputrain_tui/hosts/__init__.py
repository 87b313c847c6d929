"""Which machines there are, by what names and addresses, and which of their devices a recipe may take."""
