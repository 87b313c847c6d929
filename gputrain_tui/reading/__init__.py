"""Reading what runs leave behind: following files, the past in short, curves at every width, logs."""
