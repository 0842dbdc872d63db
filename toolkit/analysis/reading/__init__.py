"""Where outcomes come from: a study's reports, or any runner's scores, checked and cut down to `Evidence`."""
