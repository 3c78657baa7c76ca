"""What stands behind xtrain.lesson: judging a reader's kernel, figures, records, and the exercises of each lesson."""
