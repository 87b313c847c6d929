"""Other machines, reached with the ``ssh`` that the person uses: what works there in a shell works here."""
