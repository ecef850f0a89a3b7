// Swagger UI on the service's own document. Nothing is sent to its makers' validator.
SwaggerUIBundle({ url: "/openapi.json", dom_id: "#api", deepLinking: true, validatorUrl: null });
