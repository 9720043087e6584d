//! Table of the endpoints: methods, bodies, prompts and paths.
//!
//! Routing, refused methods, the reading of bodies and the table of `docs/headers.md` follow from it.

/// Maximum length of the id in a path.
const ID_BYTES_MAX: usize = 256;

/// Form of a request body.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BodyForm {
    /// A JSON object.
    Json,
    /// `multipart/form-data`.
    Form,
    /// Any bytes, or none; forwarded unread.
    Unread,
}

/// Work of a request at an engine.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Work {
    /// Generated tokens, which can be streamed.
    Generation,
    /// Other work on the accelerator.
    Computation,
    /// None on the accelerator.
    Lookup,
}

/// One row of the table.
struct Row {
    methods: &'static str,
    form: BodyForm,
    work: Work,
    #[cfg_attr(not(test), expect(dead_code, reason = "for the documentation"))]
    prompt: &'static str,
    paths: &'static [&'static str],
}

macro_rules! endpoints {
    ($($value:ident = $name:literal: $methods:literal $form:ident $work:ident $prompt:literal [$($path:literal),*];)*) => {
        pointsman::named! {
        /// A routed endpoint.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub enum Endpoint {
            $(#[doc = concat!("Endpoint `", $name, "`.")] $value = $name,)*
        }
        }

        /// Rows by the number of the endpoint.
        const ROWS: [Row; Endpoint::ALL.len()] = [$(Row {
            methods: $methods,
            form: BodyForm::$form,
            work: Work::$work,
            prompt: $prompt,
            paths: &[$($path),*],
        }),*];
    };
}

endpoints! {
    Chat = "chat": "POST" Json Generation "`messages`" ["/v1/chat/completions"];
    ChatBatch = "chat_batch": "POST" Json Computation "" ["/v1/chat/completions/batch"];
    Completions = "completions": "POST" Json Generation "`prompt`" ["/v1/completions"];
    Responses = "responses": "POST" Json Generation "`input`" ["/v1/responses"];
    Messages = "messages": "POST" Json Generation "`messages`" ["/v1/messages"];
    CountTokens = "count_tokens": "POST" Json Lookup "" ["/v1/messages/count_tokens"];
    Generate = "generate": "POST" Json Generation "`input_ids`, `token_ids` or `text`"
        ["/generate", "/inference/v1/generate"];
    Embeddings = "embeddings": "POST" Json Computation "`input`" ["/v1/embeddings"];
    Embed = "embed": "POST" Json Computation "" ["/v2/embed"];
    Rerank = "rerank": "POST" Json Computation "" ["/v1/rerank", "/rerank", "/v2/rerank"];
    Score = "score": "POST" Json Computation "" ["/v1/score", "/score"];
    Classify = "classify": "POST" Json Computation "" ["/v1/classify", "/classify"];
    Pooling = "pooling": "POST" Json Computation "" ["/pooling"];
    Tokenize = "tokenize": "POST" Json Lookup "" ["/tokenize", "/v1/tokenize"];
    Detokenize = "detokenize": "POST" Json Lookup "" ["/detokenize", "/v1/detokenize"];
    Images = "images": "POST" Json Computation "" ["/v1/images/generations"];
    Audio = "audio": "POST" Form Generation "" ["/v1/audio/transcriptions", "/v1/audio/translations"];
    Response = "response": "GET, DELETE" Unread Lookup "" ["/v1/responses/{id}"];
    CancelResponse = "cancel_response": "POST" Unread Lookup "" ["/v1/responses/{id}/cancel"];
    Realtime = "realtime": "GET" Unread Computation "" ["/v1/realtime"];
    TokenizerInfo = "tokenizer_info": "GET" Unread Lookup "" ["/tokenizer_info"];
    Further = "further": "POST" Unread Computation "" [];
}

impl Endpoint {
    /// The endpoint with this path.
    pub fn of_path(path: &str) -> Option<Self> {
        let exact = |endpoint: &Self| endpoint.row().paths.contains(&path);
        let fitting = |endpoint: &Self| endpoint.row().paths.iter().any(|pattern| fits(pattern, path));
        Self::ALL.into_iter().find(exact).or_else(|| Self::ALL.into_iter().find(fitting))
    }

    fn row(self) -> &'static Row {
        &ROWS[self as usize]
    }

    /// The first path of the endpoint, at the gateway and at workers.
    pub fn path(self) -> &'static str {
        self.row().paths.first().copied().unwrap_or_default()
    }

    /// Methods, as in the header `Allow`.
    pub fn methods(self) -> &'static str {
        self.row().methods
    }

    /// Form of the request body.
    pub fn form(self) -> BodyForm {
        self.row().form
    }

    /// Whether the response is a sequence of generated tokens, which can be streamed.
    pub fn generates(self) -> bool {
        self.row().work == Work::Generation
    }

    /// Whether a request causes work on the accelerator of an engine. Tokenization causes none.
    pub fn has_engine_work(self) -> bool {
        self.row().work != Work::Lookup
    }

    /// Whether responses have one format at all engines, which can be validated. SGLang returns a list for several prompts
    /// of `/generate`.
    pub fn has_known_response(self, is_streamed: bool) -> bool {
        match self {
            Self::Generate => is_streamed,
            Self::Embeddings | Self::CountTokens => true,
            // Whole transcriptions may be text or subtitles.
            Self::Audio => is_streamed,
            _ => self.generates(),
        }
    }

    /// The id of a stored response in the path.
    pub fn response_id(self, path: &str) -> Option<&str> {
        let has_id = matches!(self, Self::Response | Self::CancelResponse);
        path.strip_prefix("/v1/responses/").filter(|_| has_id)?.split('/').next()
    }

    /// Whether requests, responses and errors have Anthropic's format.
    pub fn is_anthropic(self) -> bool {
        matches!(self, Self::Messages | Self::CountTokens)
    }
}

/// Whether a path has this pattern, in which `{id}` is one segment of letters, digits, `-` and `_`.
fn fits(pattern: &str, path: &str) -> bool {
    let Some((start, end)) = pattern.split_once("{id}") else { return false };
    let is_in_id = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_');
    let id = path.strip_prefix(start).and_then(|rest| rest.strip_suffix(end));
    id.is_some_and(|id| (1..=ID_BYTES_MAX).contains(&id.len()) && id.bytes().all(is_in_id))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn endpoints_are_found_by_their_paths() {
        for endpoint in Endpoint::ALL {
            for pattern in endpoint.row().paths {
                assert_eq!(Endpoint::of_path(&pattern.replace("{id}", "resp_0-a")), Some(endpoint), "{pattern}");
            }
        }
        for path in ["", "/", "/v1", "/v1/rerank/", "/V1/rerank", "/v1/chat/completions/", "/v1//rerank"] {
            assert_eq!(Endpoint::of_path(path), None, "{path}");
        }
        assert!(fits("/r/{id}/cancel", "/r/a/cancel") && !fits("/r/{id}", "/r/a/cancel") && !fits("/r/{id}", "/r/"));
        assert!(
            !fits("/r/{id}", "/r/..")
                && !fits("/r/{id}", "/r/a%2f")
                && !fits("/r/{id}", &["/r/", &"x".repeat(257)].concat())
        );
    }

    #[test]
    fn the_documented_list_has_every_endpoint() {
        let page = concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/headers.md");
        let page = std::fs::read_to_string(page).expect("the page exists");
        let list = page.split("\n## ").next().unwrap_or_default();
        let rows: Vec<&str> = list.lines().filter(|line| line.starts_with("- `") && line.contains("`/")).collect();
        let row = |endpoint: &Endpoint| {
            let Row { methods, form, prompt, paths, .. } = endpoint.row();
            let methods = if *methods == "POST" { String::new() } else { format!("{methods} ") };
            let form = match form {
                BodyForm::Json => "",
                BodyForm::Form => " (form)",
                BodyForm::Unread => " (unread)",
            };
            let prompt = if prompt.is_empty() { String::new() } else { format!(", by {prompt}") };
            format!("- `{}`: {methods}`{}`{form}{prompt}", endpoint.name(), paths.join("`, `"))
        };
        let expected: Vec<String> = Endpoint::ALL.iter().filter(|of| !of.path().is_empty()).map(row).collect();
        assert_eq!(rows, expected, "the list of docs/headers.md must be\n{}", expected.join("\n"));
    }
}
