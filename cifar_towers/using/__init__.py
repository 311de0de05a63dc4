"""What is done with a run that has been trained: scoring, predicting, exporting, comparing."""
