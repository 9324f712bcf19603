"""Export to CTranslate2: the graphs that it can express, the conversion of weights, and the certificate."""
