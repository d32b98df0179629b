package main

import (
	"bufio"
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"strings"
	"time"

	"github.com/openai/openai-go/v3"
	"github.com/openai/openai-go/v3/option"
	"github.com/spf13/cobra"
)

// keyEnv names the variable with the API key: a flag's value could be read by every user of the machine.
const keyEnv = "BATON_API_KEY"

// chatOptions of `baton chat`.
type chatOptions struct {
	url, model, system string
	maxTokens          int64
	temperature        float64
	tls                clientTLS
}

func newChat() *cobra.Command {
	var o chatOptions
	c := &cobra.Command{
		Use:   "chat [message]",
		Short: "Talk to an endpoint from the terminal",
		Long: `Talks to an OpenAI-compatible endpoint. With a message: prints one answer and
ends. Without: a conversation; an empty line or Ctrl-D ends it, Ctrl-C stops an answer.
The API key for a router that wants one is taken from BATON_API_KEY in the environment.`,
		Args: cobra.ArbitraryArgs,
		RunE: func(cmd *cobra.Command, args []string) error {
			return o.run(cmd.Context(), cmd.InOrStdin(), cmd.OutOrStdout(), strings.Join(args, " "))
		},
	}
	f := c.Flags()
	f.StringVar(&o.url, "url", "http://127.0.0.1:8080", "endpoint, without /v1")
	f.StringVar(&o.model, "model", "", "model name (default: the endpoint's first)")
	f.StringVar(&o.system, "system", "", "system message")
	f.Int64Var(&o.maxTokens, "max-tokens", 512, "tokens of an answer at most")
	f.Float64Var(&o.temperature, "temperature", 0.7, "0 for greedy")
	o.tls.addTo(f)
	return c
}

func (o *chatOptions) run(ctx context.Context, in io.Reader, out io.Writer, once string) error {
	web, _, err := o.tls.client("") // the key is the library's to send
	if err != nil {
		return err
	}
	defer web.CloseIdleConnections()
	client := openai.NewClient(option.WithHTTPClient(web), option.WithBaseURL(strings.TrimRight(o.url, "/")+"/v1"), option.WithAPIKey(cmp.Or(os.Getenv(keyEnv), "none")), option.WithMaxRetries(0))
	if o.model == "" {
		short, stop := context.WithTimeout(ctx, 5*time.Second)
		defer stop()
		models, err := client.Models.List(short)
		if err != nil {
			return fmt.Errorf("ask %s for its models: %w (is `baton up` running?)", o.url, err)
		}
		if len(models.Data) == 0 {
			return fmt.Errorf("%s serves no model", o.url)
		}
		o.model = models.Data[0].ID
	}
	var history []openai.ChatCompletionMessageParamUnion
	if o.system != "" {
		history = append(history, openai.SystemMessage(o.system))
	}
	if once != "" {
		_, err := o.answer(ctx, client, append(history, openai.UserMessage(once)), out)
		return err
	}
	fmt.Fprintf(out, "%s at %s. An empty line ends.\n", o.model, o.url)
	lines := bufio.NewScanner(in)
	lines.Buffer(nil, 1<<20)
	for {
		fmt.Fprint(out, "> ")
		if !lines.Scan() || strings.TrimSpace(lines.Text()) == "" {
			fmt.Fprintln(out)
			return lines.Err()
		}
		history = append(history, openai.UserMessage(lines.Text()))
		text, err := o.interruptible(ctx, client, history, out)
		switch {
		case err == nil:
			history = append(history, openai.AssistantMessage(text))
		case ctx.Err() != nil:
			return nil
		default:
			fmt.Fprintln(out, "\n[", err, "]")
			history = history[:len(history)-1]
		}
	}
}

// interruptible lets Ctrl-C stop one answer without ending the conversation.
func (o *chatOptions) interruptible(ctx context.Context, client openai.Client, history []openai.ChatCompletionMessageParamUnion, out io.Writer) (string, error) {
	ctx, stop := signal.NotifyContext(ctx, os.Interrupt)
	defer stop()
	return o.answer(ctx, client, history, out)
}

// answer streams one answer to out.
func (o *chatOptions) answer(ctx context.Context, client openai.Client, history []openai.ChatCompletionMessageParamUnion, out io.Writer) (string, error) {
	stream := client.Chat.Completions.NewStreaming(ctx, openai.ChatCompletionNewParams{
		Model: o.model, Messages: history, MaxCompletionTokens: openai.Int(o.maxTokens), Temperature: openai.Float(o.temperature),
	})
	defer stream.Close()
	var text strings.Builder
	finished := false
	for stream.Next() {
		for _, choice := range stream.Current().Choices {
			fmt.Fprint(out, choice.Delta.Content)
			text.WriteString(choice.Delta.Content)
			finished = finished || choice.FinishReason != ""
		}
	}
	fmt.Fprintln(out)
	if err := stream.Err(); err != nil {
		return "", err
	}
	if !finished {
		return "", errors.New("the stream ended without a finish reason")
	}
	return text.String(), nil
}
